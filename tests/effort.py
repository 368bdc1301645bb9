"""How tests compile: programs that have no loop, with no effort at all.

Processes that a test compares bit for bit with its own must do the same.
"""

import inspect

from jax._src import compiler

_compiled = getattr(compiler, "compile_or_get_cached", None)


def _compiled_quickly(backend, computation, devices, compile_options, *more, **named):
    if "stablehlo.while" not in computation.operation.get_asm(large_elements_limit=8):
        options = compile_options.executable_build_options.debug_options
        options.xla_backend_optimization_level, options.xla_llvm_disable_expensive_passes = 0, True
    return _compiled(backend, computation, devices, compile_options, *more, **named)


def spare() -> None:
    """From now on. It is JAX's own function: where another version has none like it, nothing changes."""
    takes = list(inspect.signature(_compiled_quickly).parameters)[:4]
    if _compiled is not None and list(inspect.signature(_compiled).parameters)[:4] == takes:
        compiler.compile_or_get_cached = _compiled_quickly
