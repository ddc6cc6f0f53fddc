"""Shapes of models that no test could load: what their weights and caches take is known all the same."""

from quant.architecture import Architecture


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> Architecture:
    """A Llama 3 with eight key/value heads."""
    head_dim = hidden // heads
    return Architecture(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_position_embeddings=131_072,
        tied_head=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_inv_freq=(1.0,) * (head_dim // 2),
        rope_scaling=1.0,
        windows=(0,) * layers,
        eos_token_ids=(128_001,),
    )


LLAMA_8B = _llama(4096, 14_336, 32, 32)
LLAMA_70B = _llama(8192, 28_672, 80, 64)
