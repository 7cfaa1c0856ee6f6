"""Layers: imports point down, packages of one level are independent, planning imports no torch; the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from source_files import FILES, SOURCE, files_of, imports, package, parsed

import weft

# Package -> level. An import must go strictly down; `cli` and `launch` may see each other's level.
LEVELS = {
    "core": 0,
    "hardware": 1,
    "zoo": 1,
    "schedule": 1,
    "plan": 3,
    "report": 2,
    "doctor": 2,
    "comm": 2,
    "models": 2,
    "data": 2,
    "checkpoint": 2,
    "engine": 3,
    "dryrun": 4,
    "train": 4,
    "ui": 4,
    "server": 5,
    "generate": 5,
    "verify": 6,
    "launch": 7,
    "cli": 8,
}
WITHOUT_TORCH = {"core", "hardware", "zoo", "schedule", "plan", "report", "doctor", "ui"}
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py"}


@pytest.mark.parametrize("name", LEVELS)
def test_imports_point_strictly_down(name: str) -> None:
    wrong = []
    for path in files_of(name):
        for module, _ in imports(path):
            parts = module.split(".")
            if parts[0] == "weft" and len(parts) > 1 and parts[1] in LEVELS and parts[1] != name:
                wrong += [f"{path} imports {module}"] if LEVELS[parts[1]] >= LEVELS[name] else []
    assert not wrong


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_torch_free_packages_import_no_torch(name: str) -> None:
    wrong = [f"{path} imports {module}" for path in files_of(name) for module, _ in imports(path) if _is_heavy(module)]
    assert not wrong


def test_cli_imports_torch_only_inside_verbs() -> None:
    # subclasses of elastic; imported inside functions
    paths = [path for path in files_of("cli", "launch") if path.name not in ("agent.py", "host_ranks.py")]
    assert not [f"{path} imports {name}" for path in paths for name, top in imports(path) if top and _is_heavy(name)]


def _is_heavy(module: str) -> bool:
    return module.split(".")[0] in ("torch", "transformers")


def test_every_package_has_a_level_and_every_file_says_what_it_is() -> None:
    for path in FILES:
        name = package(path)
        assert name == "" or name in LEVELS, f"{name} has no level"
        assert path.name not in FORBIDDEN_NAMES
        assert ast.get_docstring(parsed(path)), f"{path} opens without a docstring"


def test_the_oracle_shares_no_code_with_what_it_judges() -> None:
    """Of weft the verdict and the bounds alone, which import next to nothing; so no bug can be on both sides."""
    allowed = {"weft.verify.verdict", "weft.verify.tolerances"}
    others = {"torch", "transformers", "numpy", "pyarrow"} | sys.stdlib_module_names
    files = sorted((SOURCE / "verify" / "oracle").glob("*.py"))
    assert len(files) >= 10
    for path in files:
        for module, _ in imports(path):
            is_own = module.startswith("weft.verify.oracle.") or module in allowed
            assert is_own or module.split(".")[0] in others, f"{path.name} imports {module}"
    for name in ("verdict", "tolerances"):
        found = {module for module, _ in imports(SOURCE / "verify" / f"{name}.py") if module.startswith("weft")}
        assert found <= {"weft.core"}, found


def test_parallel_axes_inside_the_engine_are_independent() -> None:
    axes = {"dp", "tp", "tp_grid", "pp", "ep", "cp"}
    for axis in axes:
        for path in (SOURCE / "engine" / axis).rglob("*.py"):
            for module, _ in imports(path):
                other = module.removeprefix("weft.engine.").split(".")[0]
                known = {axis, "tp"} if axis == "tp_grid" else {axis}  # the grid is a variant of tp
                assert not (module.startswith("weft.engine.") and other in axes - known), f"{path} imports {module}"


def test_parts_of_train_import_only_those_before_them() -> None:
    order = ("ranks", "folder", "ledger", "loggers", "pipeline")
    assert sorted(order) == sorted(path.parent.name for path in (SOURCE / "train").glob("*/__init__.py"))
    for position, name in enumerate(order):
        for path in (SOURCE / "train" / name).glob("*.py"):
            own = {module.split(".")[2] for module, _ in imports(path) if module.startswith("weft.train.")}
            assert own <= set(order[: position + 1]), f"{path} imports {own}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import weft"],
        ["-c", "import weft; weft.Plan; weft.RunSpec; weft.StepRecord; weft.server.ServerRun; dir(weft)"],
        ["-m", "weft", "--help"],
        ["-m", "weft", "--version"],
        ["-m", "weft", "train", "--help"],
        ["-m", "weft", "export", "--help"],
        ["-m", "weft", "report", "--help"],
        ["-m", "weft", "ui", "--help"],
        ["-m", "weft", "ui", "missing"],
        ["-m", "weft", "verify", "--help"],
        ["-m", "weft", "plan", "--help"],
        ["-m", "weft", "doctor", "--json"],
        ["-m", "weft", "dryrun", "--help"],
        ["-m", "weft", "dryrun", "missing.toml"],
        ["-m", "weft", "server", "--help"],
        ["-m", "weft", "server", "train", "--help"],
        ["-m", "weft", "server", "train", "missing.toml"],
        ["-m", "weft", "plan"],
        ["-m", "weft", "train", "missing.toml"],
        ["-m", "weft", "train", "--plan", "missing.toml"],
        ["-m", "weft", "train", "--resume", "missing"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert heavy_imports(arguments) == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "weft", "plan", "llama-3-8b", "--devices", "8xH100-80GB"],
        ["-m", "weft", "plan", "--draw-schedule", "1f1b", "--json"],  # which writes no file
        ["-m", "weft", "schedule", "1f1b", "--json"],
        ["-m", "weft", "inference", "llama-3-8b", "--devices", "H100"],
        ["-c", "import weft; weft.search; weft.estimate"],
        ["-c", "import weft.dryrun.many, weft.cli.plan.confirm, weft.cli.dryrun.sweep"],  # their processes need torch
    ],
    ids=" ".join,
)
def test_planning_needs_numpy_at_most(arguments: list[str]) -> None:
    assert heavy_imports(arguments) in ("[]", "['numpy']")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["data.source=missing.txt"], "W401"),
        (["data.source=hf:./missing"], "W401"),
        (["data.source=hf:me/texts", "HIDE=datasets"], "W403"),
        (["data.source=rows.parquet", "HIDE=pyarrow"], "W403"),
        (["data.tokenizer=./missing/tokenizer.json"], "W402"),
        (["MODEL"], "W301"),
        (["train.optimizer=adamw8bit", "HIDE=torchao"], "W403"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_is_missing_is_found_before_torch_is_imported(settings: list[str], code: str, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    model = 'path = "./missing"' if settings == ["MODEL"] else 'type = "llama"'
    (tmp_path / "run.toml").write_text(f"[model]\n{model}\n")
    shown = [part for setting in settings if setting.startswith(("data.", "train.")) for part in ("--set", setting)]
    hidden = [setting.removeprefix("HIDE=") for setting in settings if setting.startswith("HIDE=")]
    lines = [f"sys.modules[{name!r}] = None" for name in hidden]
    found, said = heavy_imports_and_words(["-m", "weft", "train", "run.toml", *shown], before=lines, cwd=tmp_path)
    assert f"error [{code}]: " in said
    assert "torch" not in found
    assert not (tmp_path / "runs").exists()


def heavy_imports(arguments: list[str]) -> str:
    """Which of the heavy libraries a fresh interpreter has imported when it is done with `arguments`."""
    return heavy_imports_and_words(arguments)[0]


def heavy_imports_and_words(
    arguments: list[str], *, before: list[str] | None = None, cwd: Path | None = None
) -> tuple[str, str]:
    """As `heavy_imports`, with what it wrote to stderr; `before`: lines of Python to begin with."""
    probe = (
        "import sys, runpy, atexit\n"
        "def tell():\n"
        "    heavy = [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]\n"
        "    print('HEAVY', heavy, file=sys.stderr)\n"
        "atexit.register(tell)\n" + "".join(f"{line}\n" for line in before or [])
    )
    if arguments[0] == "-c":
        code = probe + arguments[1]
    else:
        code = probe + f"sys.argv = {['weft', *arguments[2:]]!r}\nrunpy.run_module('weft', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )
    assert "HEAVY " in result.stderr, result.stderr
    return result.stderr.rpartition("HEAVY ")[2].strip(), result.stderr


def test_public_names_are_the_documented_ones_and_resolve() -> None:
    assert set(weft.__all__) == {
        "Engine",
        "StepFigures",
        "OptimizerPolicy",
        "Plan",
        "RunSpec",
        "StepRecord",
        "WeftError",
        "__version__",
        "dry_run",
        "estimate",
        "join",
        "leave",
        "search",
        "server",
        "train",
        "verify",
    }
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    assert callable(weft.estimate)
    assert callable(weft.search)
    assert callable(weft.train)
    assert callable(weft.verify)
    with pytest.raises(AttributeError):
        _ = weft.no_such_name
