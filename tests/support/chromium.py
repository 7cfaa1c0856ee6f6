"""A headless Chromium driven through its DevTools pipe: `with Chromium() as browser: browser.open(url)`.

Messages are JSON with a zero byte at their end, on two file descriptors: no library and no port are needed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(
    (found for name in ("chromium", "google-chrome", "chromium-browser") if (found := shutil.which(name))), ""
)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--mute-audio", "--no-first-run")
PATIENCE_S = 120.0  # generous: a machine may be ten times as busy


class Chromium:
    """One page of one browser. `errors` has the exceptions and error messages of the page's scripts."""

    def __init__(self, *, width: int = 1280, height: int = 900, program: str = PROGRAM) -> None:
        self.errors: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="weft-chromium-", ignore_cleanup_errors=True)
        self._number, self._replies, self._session = 0, {}, {}
        # Above 9, so that 3 and 4, which Chromium reads and writes, are free for them.
        theirs_in, self._out, self._in, theirs_out = (_raised(end) for end in (*os.pipe(), *os.pipe()))
        flags = [*FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}',
                "bash",
                program,
                *flags,
                "--remote-debugging-pipe",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def processes(self) -> list[int]:
        """The browser's process and those that it started, by the parents that the kernel knows."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = [self._process.pid]
        for process in found:
            found += [child for child, parent in parents.items() if parent == process]
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, or of its promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of the expression once it is true; a page that is still loading counts as false."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                if found := self.run(script):
                    return found
            except RuntimeError:
                pass
            time.sleep(0.02)
        raise TimeoutError(f"{script} did not become true; errors of the page: {self.errors}")

    def photograph(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools method."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while self._number not in self._replies:
            self._receive()
        reply = self._replies.pop(self._number)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply.get("result", {})

    def _receive(self) -> None:
        data = os.read(self._in, 2**20)
        if not data:
            raise RuntimeError("the browser ended")
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._replies[message["id"]] = message
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(str(message["params"]["entry"]))


def _raised(descriptor: int) -> int:
    raised = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return raised
