"""One process of an `EncodePool`: tasks come on stdin, parts go to files, an empty answer or an error to stdout."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from contextlib import suppress
from typing import Any

from weft.core.errors import RunError, WeftError
from weft.core.quiet import quiet_libraries
from weft.data.encode_pool import EncodeTask
from weft.data.parts import encode_part, write_part
from weft.data.samples import SampleEncoder
from weft.data.tokenizers import Tokenizer, open_tokenizer


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the builder ends this process
    quiet_libraries()
    # Otherwise output of a library would mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    encoder, key = pickle.load(sys.stdin.buffer)
    tokenizer = open_tokenizer(encoder) if isinstance(encoder, str) else SampleEncoder(encoder)
    with suppress(EOFError, BrokenPipeError):
        while True:
            answer = _carry_out(pickle.load(sys.stdin.buffer), tokenizer=tokenizer, key=key)
            pickle.dump(answer, answers)
            answers.flush()


def _carry_out(task: EncodeTask, *, tokenizer: Tokenizer | SampleEncoder, key: str) -> dict[str, Any]:
    """Encode and write the part; returns the error's fields, empty on success."""
    try:
        part = encode_part(task.documents, tokenizer=tokenizer)
        write_part(task.path, part, key=key, documents_crc32=task.documents_crc32)
    except WeftError as error:
        return dict(error.as_dict())
    except Exception as error:  # a tokenizer may raise anything; the builder raises it again
        return dict(RunError(f"tokenising failed: {type(error).__name__}: {error}").as_dict())
    return {}


if __name__ == "__main__":
    main()
