"""Ask for the cache line of one element of an array, without waiting for it. For compiled code only.

    prefetch(array, position)        into every level: a line that is read next
    prefetch_far(array, position)    into the outer levels: many lines of one record. The first level has room for
                                     sixteen requests on their way; asked for there, records take a third longer

`position` counts elements of a C-contiguous array from its start, whatever its shape; it is not checked, and a line
that is not mapped is ignored by the processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

NAME = "llvm.prefetch.p0"
READ, DATA = 0, 1
EVERY_LEVEL, OUTER_LEVELS = 3, 1


def _emitter(level: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(array.data, [args[1]]), byte_pointer)
        function = builder.module.globals.get(NAME)
        if function is None:
            shape = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
            function = ir.Function(builder.module, shape, NAME)
        builder.call(function, [address, *(ir.Constant(i32, hint) for hint in (READ, level, DATA))])
        return context.get_dummy_value()

    return emit


def _prefetch(typing_context: Any, array: Any, position: Any) -> Any:
    return types.void(array, types.intp), _emitter(EVERY_LEVEL)


def _prefetch_far(typing_context: Any, array: Any, position: Any) -> Any:
    return types.void(array, types.intp), _emitter(OUTER_LEVELS)


prefetch: Any = intrinsic(_prefetch)
prefetch_far: Any = intrinsic(_prefetch_far)
