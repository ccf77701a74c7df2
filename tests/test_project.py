"""What the project promises about itself: versions in one place, the order of imports, the README's
commands."""

import ast
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
ORDER = [
    "collectives", "schedule", "shard", "structure", "wrap", "unit", "strategy", "fsdp", "optim", "precision",
    "baselines.data_parallel", "models.gpt", "memory", "plots", "data",
]  # fmt: skip
DOORS = ["demo", "bench"]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minifsdp"):
            if node.module == "minifsdp":
                yield from (alias.name for alias in node.names)
            else:
                yield node.module.removeprefix("minifsdp.")


def test_a_file_imports_only_files_above_it():
    files = [
        str(p.relative_to(ROOT / "minifsdp").with_suffix("")).replace("/", ".")
        for p in (ROOT / "minifsdp").rglob("*.py")
    ]
    assert sorted(f for f in files if "__init__" not in f) == sorted(ORDER + DOORS)
    for place, name in enumerate(ORDER + DOORS):
        above = set(ORDER[:place]) if name in ORDER else set(ORDER)
        assert set(imports_of(ROOT / "minifsdp" / f"{name.replace('.', '/')}.py")) <= above, name


def test_only_collectives_calls_collectives():
    calls = re.compile(r"dist\.(all_\w+|reduce\w*|broadcast\w*|i?send|i?recv|gather|scatter|barrier)\(")
    for path in (ROOT / "minifsdp").rglob("*.py"):
        if path.name not in ("collectives.py", "bench.py"):
            assert not calls.search(path.read_text()), path


def test_environment_yml_takes_its_versions_from_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, section = environment["dependencies"]
    assert pip == "pip"
    assert section == {"pip": ["-e .[dev]"]}
    (required,) = re.findall(
        r'^requires-python = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert python == f"python{required}"


def test_the_readme_has_the_commands():
    readme = (ROOT / "README.md").read_text()
    venv = "python -m venv .venv && .venv/bin/pip install -e"
    assert f"{venv} . && .venv/bin/torchrun --nproc-per-node 4 -m minifsdp.demo\n" in readme
    assert "python -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest" in readme
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        assert target.startswith("http") or (ROOT / target).exists(), target
