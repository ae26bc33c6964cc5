"""Machine code: compiling LLVM text, and loading what was compiled before."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from functools import cache
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm

from pcnet.engine.compiled.cache import ObjectCache

_LOCK = threading.RLock()
OPTIMISATION = 2


class Processor(NamedTuple):
    """The processor that code is compiled for.

    fused: whether it has fused multiply-add instructions. wide: whether its vectors hold eight doubles.
    """

    name: str
    features: str
    fused: bool
    wide: bool


@cache
def processor() -> Processor:
    with _LOCK:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        fused = bool(features.get("fma", features.get("neon", False)))
        return Processor(llvm.get_host_cpu_name(), features.flatten(), fused, bool(features.get("avx512f")))


def _machine(level: int = OPTIMISATION) -> Any:
    host = processor()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=host.name, features=host.features, opt=level, jit=True)


class Library:
    """Compiled functions. They stay in memory as long as this object does."""

    def __init__(self, code: bytes) -> None:
        with _LOCK:
            machine = _machine()
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()

    def address(self, name: str) -> int:
        found = int(self._engine.get_function_address(name))
        if not found:
            raise KeyError(name)
        return found

    def function(self, name: str, *arguments: Any) -> Any:
        """A function that returns an int64, for ctypes; it keeps the library in memory."""
        found = ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)(self.address(name))
        found.library = self  # type: ignore[attr-defined]
        return found


@cache
def platform() -> str:
    """What compiled code depends on beside its text: LLVM and the processor."""
    host = processor()
    return "\0".join([llvmlite.__version__, ".".join(map(str, llvm.llvm_version_info)), host.name, host.features])


def code_key(text: str) -> str:
    """The key under which the code of a text is kept."""
    return hashlib.sha256(f"{text}\0{platform()}".encode()).hexdigest()


def compiled(text: str, cache_: ObjectCache | None, *, vectorise: bool = False, quick: bool = False) -> Library:
    """The functions of a module of LLVM text, from the cache if they are there.

    vectorise: whether to optimise loops. quick: whether to save time, because the code runs only once.
    """
    key = code_key(text)
    code = None if cache_ is None else cache_.get(key)
    if code is not None:
        return Library(code)
    code = _compile(text, vectorise, quick)
    if cache_ is not None:
        cache_.put(key, code)
    return Library(code)


def _compile(text: str, vectorise: bool, quick: bool) -> bytes:
    with _LOCK:
        machine = _machine(0 if quick else OPTIMISATION)
        module = llvm.parse_assembly(text, llvm.create_context())  # the global one never forgets constants
        module.triple, module.data_layout = llvm.get_process_triple(), str(machine.target_data)
        module.verify()
        if not vectorise or quick:  # scalars are simplified already, and LLVM's passes would gain nothing
            return bytes(machine.emit_object(module))
        tuning = llvm.create_pipeline_tuning_options(speed_level=OPTIMISATION)
        tuning.slp_vectorization, tuning.loop_vectorization = False, True
        builder = llvm.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
        return bytes(machine.emit_object(module))
