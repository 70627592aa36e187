"""Functions compiled with XLA:CPU, equal ones once, and run on virtual devices.

Imported by child processes only: it starts JAX with its devices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.verify.element_types import Array

Parts = tuple[Any, ...]  # what each device has of a value: arrays that lie on the devices


class Executables:
    """Compiles for `count` devices and keeps what it compiled."""

    def __init__(self, count: int) -> None:
        self.devices = jax.devices()[:count]
        # "Replicated" with other contents on each device: the only form that holds any values.
        mesh = Mesh(np.array(self.devices), ("device",))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._compiled: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def compiled(self, module: ir.Module) -> Any:
        """What XLA:CPU makes of a module. Raises whatever XLA raises.

        It keeps to the program's rounding where it can: see `verify.execution_process`.
        """
        text = to_text(module)
        if text not in self._compiled:
            self._compiled[text] = self._keeping_rounding(bindings.write_bytecode(module))
        return self._compiled[text]

    def compile_ahead(self, modules: Sequence[ir.Module]) -> None:
        """Compiles several at once. What XLA refuses is left for `compiled` to say."""
        codes = {to_text(module): bindings.write_bytecode(module) for module in modules}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {t: pool.submit(self._keeping_rounding, code) for t, code in codes.items()}
        done = {t: future.result() for t, future in futures.items() if not future.exception()}
        self._compiled.update(done)

    def run(self, executable: Any, operands: Sequence[Parts]) -> list[Parts]:
        """The results of what `compiled` returned; operands are left as they are."""
        results = executable.execute_sharded([self._argument(parts) for parts in operands])
        return [tuple(parts) for parts in results.disassemble_into_single_device_arrays()]

    def placed(self, parts: Sequence[Array]) -> Parts:
        """Arrays, one for each device, on the devices."""
        pairs = zip(parts, self.devices, strict=True)
        return tuple(jax.device_put(np.array(part), device) for part, device in pairs)

    def _keeping_rounding(self, code: bytes) -> Any:
        skipped = bindings.REROUNDING_PASSES
        try:
            return self._compile(code, skipped)
        except Exception:  # XLA's own types; what it says counts when it fails again
            kept = [name for name in skipped if name not in bindings.INDISPENSABLE_PASSES]
            return self._compile(code, kept)

    def _compile(self, code: bytes, skipped: Sequence[str]) -> Any:
        count = len(self.devices)
        return bindings.compile_for_devices(
            code, 1, count, self.devices, partitioned=False, skipped_passes=skipped
        )

    def _argument(self, parts: Parts) -> Any:
        if len(parts) == 1:
            return parts[0]
        return jax.make_array_from_single_device_arrays(parts[0].shape, self._whole, list(parts))
