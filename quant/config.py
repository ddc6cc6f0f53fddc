"""What `quant` is told: the precision of the verifier and of its outer layers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["w8a8", "bf16", "float32", "float64"]


class QuantConfig(BaseModel):
    """How the checkpoint's weights are held by the target model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision = Field(
        "w8a8",
        description="Precision of the verifier: w8a8 (int8 weights and activations), bf16, "
        "or float32/float64 as references.",
    )
    head: Literal["int8", "bf16"] = Field(
        "int8",
        description="The language-model head under w8a8: int8 weights with 16-bit activations "
        "(exact integer sums), or bf16.",
    )
    embeddings: Literal["int8", "bf16"] = Field(
        "bf16", description="The token embeddings under w8a8: bf16, or int8 with a scale a row."
    )
