"""Hosts for the doctor as folders: tests/unit/doctor/hosts/*.toml, with the overlay of a fault.

A host has [files], [commands] (output, or a table with its code), [environment], [packages], [disk], [nvidia] (a
template per GPU) and [[each]] (files that are repeated with {i}). An overlay replaces entries of the same tables;
`remove` drops files and commands; `edit` replaces one occurrence of a text in a file or output, which must be there;
`replace` all of them, in a folder too.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.doctor.machine import CommandOutput, Machine

HOSTS = Path(__file__).parents[1] / "unit" / "doctor" / "hosts"


def read_faults(name: str = "faults") -> list[dict[str, Any]]:
    return list(tomllib.loads((HOSTS / f"{name}.toml").read_text(encoding="utf-8"))["fault"])


def make_host(name: str, folder: Path, overlay: dict[str, Any] | None = None) -> Machine:
    """Write the host's files below `folder`; its commands answer from the record."""
    host, overlay = tomllib.loads((HOSTS / f"{name}.toml").read_text(encoding="utf-8")), overlay or {}
    files, commands = _files(host), _commands(host)
    files.update(overlay.get("files", {}))
    commands.update(overlay.get("commands", {}))
    for entry in overlay.get("remove", []):
        _remove(entry, files, commands)
    for edit in overlay.get("edit", []):
        _edit(edit, files, commands)
    for edit in overlay.get("replace", []):
        _replace(edit, files, commands)
    packages = {**host["packages"], **overlay.get("packages", {})}
    files.update(
        {f"site/{package}-{version}.dist-info/METADATA": "" for package, version in packages.items() if version}
    )
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    disk = {**host["disk"], **overlay.get("disk", {})}
    return Machine(
        root=folder,
        run=_runner(commands),
        environment={**host["environment"], **overlay.get("environment", {})},
        folder=Path(overlay.get("folder", host["folder"])),
        sites=(folder / "site",),
        measure_disk=lambda _: disk,
        python=overlay.get("python", host["python"]),
    )


def _files(host: dict[str, Any]) -> dict[str, str]:
    files = dict(host["files"])
    for repeated in host.get("each", []):
        for index in range(repeated["count"]):
            files.update({key.format(i=index): text.format(i=index) for key, text in repeated["files"].items()})
    return files


def _commands(host: dict[str, Any]) -> dict[str, Any]:
    commands = dict(host["commands"])
    if "nvidia" in host:
        gpu = (HOSTS / host["nvidia"]["template"]).read_text(encoding="utf-8")
        buses = enumerate(host["nvidia"]["buses"])
        blocks = "".join(gpu.replace("{bus}", bus).replace("{index}", str(index)) for index, bus in buses)
        commands["nvidia-smi -q -x"] = (
            '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
            f"\t<driver_version>{host['nvidia']['driver']}</driver_version>\n"
            f"\t<cuda_version>{host['nvidia']['cuda']}</cuda_version>\n"
            f"\t<attached_gpus>{len(host['nvidia']['buses'])}</attached_gpus>\n{blocks}</nvidia_smi_log>\n"
        )
    return commands


def _remove(entry: str, files: dict[str, str], commands: dict[str, Any]) -> None:
    """A file, a folder with all in it, or a command."""
    gone = [path for path in files if path == entry or path.startswith(f"{entry}/")]
    assert gone or entry in commands, f"nothing is called {entry}"
    commands.pop(entry, None)
    for path in gone:
        del files[path]


def _edit(edit: dict[str, Any], files: dict[str, str], commands: dict[str, Any]) -> None:
    store = files if edit["in"] in files else commands
    parts = store[edit["in"]].split(edit["from"])
    nth = edit.get("nth", 0)
    assert len(parts) > nth + 1, f"{edit['from']!r} is not in {edit['in']} {nth + 1} times"
    store[edit["in"]] = edit["from"].join(parts[: nth + 1]) + edit["to"] + edit["from"].join(parts[nth + 1 :])


def _replace(edit: dict[str, str], files: dict[str, str], commands: dict[str, Any]) -> None:
    """All occurrences in a command's output, a file, or the files of a folder."""
    count = 0
    for store in (files, commands):
        for key in [key for key in store if key == edit["in"] or key.startswith(f"{edit['in']}/")]:
            count += store[key].count(edit["from"])
            store[key] = store[key].replace(edit["from"], edit["to"])
    assert count, f"{edit['from']!r} is not in {edit['in']}"


def _runner(commands: dict[str, Any]) -> Any:
    def run(command: Sequence[str]) -> CommandOutput | None:
        found = commands.get(" ".join(command))
        if found is None or isinstance(found, str):
            return None if found is None else CommandOutput(found)
        return CommandOutput(found.get("text", ""), code=found.get("code", 0), timed_out=found.get("timed_out", False))

    return run
