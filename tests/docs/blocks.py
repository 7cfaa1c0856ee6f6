"""The fenced blocks of the documentation, and the one way in which they are carried out.

All pages tell one story in one folder: README first, then docs/start, then the guides, each in `PAGES` order.

    ```toml      checked as run.toml (of ranks or servers), plan.toml, a device or measurements of devices;
                 `# name.toml` in its first line makes it a file of that folder
    ```python    run as a script; `# name.py` in its first line makes it a file too
    ```bash      run line by line in that folder; a line that an earlier page ran is not run again
    ```bash no-run, ```text     shown, never run; the line before a no-run block says why
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = (
    "data",
    "fine-tune",
    "while-training",
    "lora",
    "preference",
    "distillation",
    "models",
    "layouts",
    "tensor-parallel",
    "pipeline",
    "context-parallel",
    "speed",
    "plan",
    "dryrun",
    "resume-and-checkpoints",
    "precision-and-optimizers",
    "formats",
    "doctor",
    "several-machines",
    "collectives",
    "parameter-server",
)
LEDGER = "docs/guides/ledger.md"
PAGES = (
    "README.md",
    "docs/start/first-run.md",
    "docs/start/next-steps.md",
    *(f"docs/guides/{name}.md" for name in (*GUIDES, "python-api", "export", "generate", "ui")),
    LEDGER,
)
# Run by tests of their own (test_readme.py): they set up a virtual environment, which takes minutes.
SETUP_LINES = ("python3 -m venv ", "scripts/test")
_FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"^# ([\w-]+\.(?:toml|py))$", re.MULTILINE)
_SHELL = frozenset("|&;<>()$`*?~=")
PATIENCE_S = 300


@dataclass(frozen=True)
class Block:
    """One fenced block. `before` is the last line of prose above it."""

    page: str
    line: int
    info: str
    body: str
    before: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        match = _NAME.match(self.body)
        return match[1] if match else None


def all_pages() -> list[str]:
    """Every Markdown page of the project."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def read_blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(text):
        above = [line for line in text[: match.start()].splitlines() if line.strip()]
        line = text[: match.start()].count("\n") + 1
        blocks.append(Block(page, line, match["info"].strip(), match["body"], above[-1] if above else ""))
    return blocks


def command_lines(block: Block) -> list[str]:
    """The commands of a bash block: continued lines joined, comments and blank lines left out."""
    lines = block.body.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


@dataclass
class Story:
    """The folder in which the pages are carried out, and what was run there so far."""

    folder: Path
    done: set[str] = field(default_factory=set)
    _server: subprocess.Popen[str] | None = None

    def tell(self, page: str) -> None:
        """Carry out one page."""
        for block in read_blocks(page):
            if block.info in ("toml", "python") and block.file_name is not None:
                (self.folder / block.file_name).write_text(block.body, encoding="utf-8")
            if block.info == "python":
                self._run_python(block)
            elif block.info == "bash":
                for line in command_lines(block):
                    for part in line.split(" && weft "):
                        self.run(part if line.startswith(part) else f"weft {part}", where=block.where)

    def run(self, line: str, *, where: str) -> None:
        words = shlex.split(line, comments=True)
        command = shlex.join(words)
        if command in self.done or line.startswith(SETUP_LINES):
            return
        is_plain = words[0] == "weft" and not _SHELL & set("".join(w.partition("=")[0] for w in words))
        began_s = time.monotonic()
        if is_plain and words[1] == "train" and not where.startswith(LEDGER):
            words += ["--set", "ledger.dry_run=false"]  # ten seconds each; the ledger's own page and torchrun show it
        code, output = self._run_warm(words) if is_plain else self._run_shell(line)
        print(f"{time.monotonic() - began_s:5.1f} s  {line}")
        assert code == 0, f"{where}: {line}\nended with {code}:\n{output}"
        self.done.add(command)

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()  # the end of its stdin ends it

    def _run_python(self, block: Block) -> None:
        path = self.folder / (block.file_name or "block.py")
        path.write_text(block.body, encoding="utf-8")
        code, output = self._run_warm(["python", str(path)])
        assert code == 0, f"{block.where}: the script ended with {code}:\n{output}"

    def _run_shell(self, line: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout

    def _run_warm(self, words: list[str]) -> tuple[int, str]:
        """The same command in a process forked from one that has imported torch and transformers already."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm_server.py"))],
                cwd=self.folder,
                env=environment(self.folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(words) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline() or '{"code": -1, "output": "the server is gone"}')
        return answer["code"], answer["output"]


def environment(folder: Path) -> dict[str, str]:
    """This environment with its own `weft` first on the path and a token cache of its own.

    No GPU, so that the story is the same on every machine.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    settings = {
        "PATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return {**os.environ, **settings}
