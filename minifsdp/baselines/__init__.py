"""What FSDP is compared with."""
