"""The error tree: every failure that a user can cause or encounter, each with a code, one sentence and a hint.

Programming errors do not belong here: they stay ordinary Python exceptions with their stack traces.

    WeftError
    ├── InputError                 exit 2: the request cannot be executed
    │   ├── ConfigFileError   W101   a TOML file is missing or is not TOML
    │   ├── UnknownKeyError   W102   a key that does not exist, with the nearest spelling
    │   ├── BadValueError     W103   a key whose value is out of range or of the wrong kind
    │   ├── PlanError         W201   the plan contradicts itself
    │   ├── MeshError         W202   the mesh does not match the ranks
    │   ├── BatchError        W203   the batch does not divide over the plan
    │   ├── NotBuiltError     W204   a legal plan that this version cannot execute
    │   ├── DeviceError       W205   the plan needs devices that this machine lacks
    │   ├── TensorParallelError W206 the model cannot be sharded over the plan's tensor-parallel ranks
    │   ├── PipelineError     W207   the model cannot be split into the plan's pipeline stages
    │   ├── ModelError        W301   the model is unknown or cannot be built
    │   ├── NoBlocksError     W302   no repeated blocks, so nothing to shard by
    │   ├── WeightsError      W303   weight files are missing or do not match the model
    │   ├── AdapterError      W304   the adapter does not match the model, or its files are damaged
    │   ├── DataError         W401   the data source is missing, empty or too short
    │   ├── TokenizerError    W402   the tokenizer is missing or does not fit the model
    │   ├── MissingExtraError W403   an optional dependency is not installed
    │   ├── RunFolderError    W501   the run folder exists already, is missing, or is not a run folder
    │   ├── FolderBusyError   W502   another process is training into the run folder
    │   ├── RunChangedError   W503   a resume requests other data or another model than recorded
    │   ├── PlaceError        W901   the place of a launch has no sbatch, kubectl or Ray, or refused the job
    │   ├── TableError        W801   a table does not exist, or has another description
    │   ├── TokenError        W802   a server refused the token
    │   └── HostsError        W902   a host cannot be reached, or differs from the others
    ├── CheckpointError       W601   no usable checkpoint, or one that does not match the model (exit 2)
    ├── RunError                 exit 3: something broke while running
    │   ├── SaveError         W602   a checkpoint could not be written
    │   ├── DiskFullError     W603   a file of the run could not be written: no space is left
    │   ├── StateFileError    W604   a file of offloaded states was not read or written, or has other contents
    │   ├── RankError         W701   a rank died; the message is that rank's own
    │   ├── NumbersError      W702   the loss or the gradient norm is not finite
    │   ├── MemoryLimitError  W703   a device ran out of memory
    │   ├── StallError        W704   a rank did not arrive in a collective that the others waited in
    │   ├── HostLostError     W705   a host of the job ended, or its link is silent
    │   ├── ServerLostError   W811   a parameter server did not come back
    │   ├── WireError         W812   bytes from a socket do not follow the protocol
    │   ├── LogError          W813   a server's log or snapshot cannot be written
    │   └── WorkerError       W814   a worker of parameter servers failed; the message is its own
"""

from __future__ import annotations

from collections.abc import Iterator

DISTRIBUTION = "weft-train"  # `weft` on PyPI is another project; the import name and the command are `weft`


class WeftError(Exception):
    """One sentence, a code, a hint. `str(error)` is the sentence only."""

    code = "W000"
    exit_code = 3

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, str | int]:
        return {
            "error": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class InputError(WeftError):
    """The request cannot be executed; nothing was started."""

    code = "W100"
    exit_code = 2


class ConfigFileError(InputError):
    """A TOML file is missing or is not TOML."""

    code = "W101"


class UnknownKeyError(InputError):
    """A key that does not exist; the hint names the nearest spelling."""

    code = "W102"


class BadValueError(InputError):
    """A key whose value is out of range or of the wrong kind."""

    code = "W103"


class PlanError(InputError):
    """The plan contradicts itself."""

    code = "W201"


class MeshError(InputError):
    """The plan's mesh does not match the number of ranks."""

    code = "W202"


class BatchError(InputError):
    """The batch does not divide over the plan's ranks and micro-batches."""

    code = "W203"


class NotBuiltError(InputError):
    """A legal plan or model feature that this version cannot execute."""

    code = "W204"


class DeviceError(InputError):
    """The plan needs devices that this machine lacks."""

    code = "W205"


class TensorParallelError(InputError):
    """The model cannot be sharded over the plan's tensor-parallel ranks."""

    code = "W206"


class PipelineError(InputError):
    """The model cannot be split into the plan's pipeline stages."""

    code = "W207"


class ModelError(InputError):
    """The model is unknown or cannot be built."""

    code = "W301"


class NoBlocksError(InputError):
    """The model has no repeated blocks, so there is nothing to shard by."""

    code = "W302"


class WeightsError(InputError):
    """Weight files are missing or do not match the model."""

    code = "W303"


class AdapterError(InputError):
    """The adapter does not match the model, or its files are missing or damaged."""

    code = "W304"


class DataError(InputError):
    """The data source is missing, empty or too short."""

    code = "W401"


class TokenizerError(InputError):
    """The tokenizer is missing or does not fit the model."""

    code = "W402"


class MissingExtraError(InputError):
    """An optional dependency is not installed."""

    code = "W403"

    def __init__(self, message: str, *, hint: str = "", extra: str = "") -> None:
        super().__init__(message, hint=hint or f"pip install '{DISTRIBUTION}[{extra}]'")


class RunFolderError(InputError):
    """The run folder exists already, is missing, or is not a run folder."""

    code = "W501"


class FolderBusyError(InputError):
    """Another process is training into the run folder."""

    code = "W502"


class RunChangedError(InputError):
    """A resume requests other data or another model than recorded, without --set."""

    code = "W503"


class PlaceError(InputError):
    """The place of a launch has no sbatch, kubectl or Ray, or refused the job."""

    code = "W901"


class TableError(InputError):
    """A table of a parameter server does not exist, or has another description."""

    code = "W801"


class TokenError(InputError):
    """A parameter server refused the token."""

    code = "W802"


class HostsError(InputError):
    """A host of a launch cannot be reached, or differs from the others; nothing was started."""

    code = "W902"


class CheckpointError(WeftError):
    """There is no usable checkpoint, or it does not match the model."""

    code = "W601"
    exit_code = 2


class RunError(WeftError):
    """A failure while running; committed checkpoints are safe."""

    code = "W700"
    exit_code = 3


class SaveError(RunError):
    """A checkpoint could not be written."""

    code = "W602"


class DiskFullError(RunError):
    """A file of the run could not be written: no space is left."""

    code = "W603"


class StateFileError(RunError):
    """A file of offloaded states could not be read or written, or does not hold what was written."""

    code = "W604"


class RankError(RunError):
    """A rank died; the message is that rank's own."""

    code = "W701"


class NumbersError(RunError):
    """The loss or the gradient norm is not finite."""

    code = "W702"


class MemoryLimitError(RunError):
    """A device ran out of memory."""

    code = "W703"


class StallError(RunError):
    """A rank did not arrive in a collective that the others waited in; the message names it."""

    code = "W704"


class HostLostError(RunError):
    """A host of the job ended, or its link is silent."""

    code = "W705"


class ServerLostError(RunError):
    """A parameter server did not come back."""

    code = "W811"


class WireError(RunError):
    """Bytes from a socket do not follow the protocol of weft's servers."""

    code = "W812"


class LogError(RunError):
    """A parameter server's log or snapshot cannot be written; no acknowledged update is lost."""

    code = "W813"


class WorkerError(RunError):
    """A worker of parameter servers failed; the message is its own."""

    code = "W814"


def error_classes() -> Iterator[type[WeftError]]:
    """Every class of the tree, parents before children: the source of the documented list."""

    def walk(cls: type[WeftError]) -> Iterator[type[WeftError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from walk(child)

    return walk(WeftError)


def error_from_dict(fields: dict[str, str | int]) -> WeftError:
    """The error that another process recorded with `as_dict`; an unknown name becomes a RankError."""
    by_name = {cls.__name__: cls for cls in error_classes()}
    cls = by_name.get(str(fields.get("error", "")), RankError)
    return cls(str(fields.get("message", "")), hint=str(fields.get("hint", "")))


def first_line(error: BaseException) -> str:
    """The first line of the message of an error; the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
