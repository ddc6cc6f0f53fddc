"""The Ascend NPU's backend: the CUDA backend's operations, int8 products by the vendor's operator.

`torch_npu` comes with the vendor's toolkit (CANN) and is imported only here. Not tried on a device yet.

Legend: T tokens of a pass, K inputs, N outputs.
"""

import importlib

import torch

from workers.backend import Forward, Linear, LinearWeights
from workers.cuda import CudaBackend, Int8Linear
from workers.torch_backend import TorchBackend


class NpuBackend(CudaBackend):
    """See the module's text."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "npu") -> None:
        self._operators = importlib.import_module(
            "torch_npu"
        )  # It makes the device known to torch.
        super().__init__(dtype, device)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; int8 weights are unpacked on the device."""
        if weights.scale_N is None:
            return super().linear(weights)
        return _NpuInt8Linear(weights, self, self._operators)

    def launcher(self, forward: Forward) -> Forward:
        """The pass as it is: graphs are CUDA's."""
        return TorchBackend.launcher(self, forward)


class _NpuInt8Linear(Int8Linear):
    def __init__(self, weights: LinearWeights, backend: TorchBackend, operators: object) -> None:
        super().__init__(weights, backend)
        self._operators = operators
        self._one = torch.ones(1, dtype=torch.float32, device=backend.device)

    def _product(self, codes_TK: torch.Tensor) -> torch.Tensor:
        """Exact int32 sums of int8 codes: the operator's own scaling is left at one."""
        sums: torch.Tensor = self._operators.npu_quant_matmul(  # type: ignore[attr-defined]
            codes_TK, self._weight_NK.T, self._one, output_dtype=torch.int32
        )
        return sums
