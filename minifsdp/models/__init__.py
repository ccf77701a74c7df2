"""What is trained: plain PyTorch models, with no parallel code inside."""
