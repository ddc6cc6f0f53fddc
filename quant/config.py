"""What `quant` is told: the precision of the verifier and of its outer layers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Precision = Literal["w8a8", "bf16", "float32", "float64"]
Recipe = Literal["rtn", "smoothquant", "m2"]


class QuantConfig(BaseModel):
    """How the checkpoint's weights are held by the target model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision = Field(
        "w8a8",
        description="Precision of the verifier: w8a8 (int8 weights and activations), bf16, "
        "or float32/float64 as references.",
    )
    recipe: Recipe = Field(
        "m2",
        description="How w8a8 weights are made: m2 (SmoothQuant with searched thresholds), smoothquant, "
        "or rtn (round to nearest; no calibration, unless linears are to be left in bf16).",
    )
    alpha: float | None = Field(
        None, ge=0, le=1, description="SmoothQuant's exponent; None: searched for every linear."
    )
    calibration: str | None = Field(
        None,
        description="Prompt file (path or URI) whose texts the recipe calibrates on; None: the set that "
        "ships with the project.",
    )
    num_calibration_samples: int = Field(128, ge=1, description="Texts of it that are used.")
    max_calibration_tokens: int = Field(
        64, ge=2, description="Tokens of a text that are used; the rest is cut off."
    )
    target_agreement: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Leave the worst linears in bf16 until this share of first choices agrees with the "
        "original on calibration texts.",
    )
    max_float_bytes: int | None = Field(
        None, ge=0, description="The most that linears left in bf16 may take."
    )
    head: Literal["int8", "bf16"] = Field(
        "int8",
        description="The language-model head under w8a8: int8 weights with 16-bit activations "
        "(exact integer sums), or bf16.",
    )
    down_activations: Literal["int8", "int16"] = Field(
        "int8",
        description="Activations of down_proj under w8a8: int8, or int16 as the head has them. Closer to "
        "the original; costs nothing on CPUs without VNNI.",
    )
    embeddings: Literal["int8", "bf16"] = Field(
        "bf16", description="The token embeddings under w8a8: bf16, or int8 with a scale a row."
    )

    @model_validator(mode="after")
    def _check_alpha(self) -> "QuantConfig":
        if self.recipe == "rtn" and self.alpha is not None:
            raise ValueError("alpha has no part in the recipe rtn")
        return self

    def reference(self) -> "QuantConfig":
        """The original model, in float32."""
        return QuantConfig(precision="float32")

    @property
    def needs_calibration(self) -> bool:
        """Whether anything is measured on texts."""
        chooses = self.target_agreement is not None or self.max_float_bytes is not None
        return self.precision == "w8a8" and (self.recipe != "rtn" or chooses)
