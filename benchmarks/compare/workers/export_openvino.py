"""Convert a Hugging Face folder for OpenVINO. Settings: ``model``, ``target``, ``quantisation`` (arguments of
``OVWeightQuantizationConfig``, or null)."""

from __future__ import annotations

from lines import settings
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig


def main() -> None:
    wanted = settings()
    quantisation = wanted["quantisation"]
    model = OVModelForCausalLM.from_pretrained(
        wanted["model"],
        export=True,
        compile=False,
        # Left alone, models of more than a billion parameters are rounded to 8 bits.
        load_in_8bit=False,
        quantization_config=quantisation and OVWeightQuantizationConfig(**quantisation),
    )
    model.save_pretrained(wanted["target"])


if __name__ == "__main__":
    main()
