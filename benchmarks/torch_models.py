"""Models of other packages as their users build them, small: for `torch_coverage.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

_SMALL, _LARGEST = 4_000_000, 100_000_000  # parameters
_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {key: _TEXT[key] for key in list(_TEXT)[:4]} | {"image_size": 32, "patch_size": 8}
_LANGUAGE_MODELS = """
    GPT2LMHeadModel LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM
    Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM PhiForCausalLM
    Phi3ForCausalLM OPTForCausalLM GPTNeoXForCausalLM GPTJForCausalLM BloomForCausalLM
    FalconForCausalLM StableLmForCausalLM OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM
    GraniteForCausalLM CohereForCausalLM Starcoder2ForCausalLM MambaForCausalLM
    NemotronForCausalLM PersimmonForCausalLM BertForMaskedLM RobertaForMaskedLM
    DistilBertForMaskedLM ElectraForMaskedLM AlbertForMaskedLM DebertaForMaskedLM
    DebertaV2ForMaskedLM ModernBertForMaskedLM MobileBertForMaskedLM ConvBertForMaskedLM
    RoFormerForMaskedLM NystromformerForMaskedLM FNetForMaskedLM BigBirdForMaskedLM
    OpenAIGPTLMHeadModel XGLMForCausalLM BioGptForCausalLM CodeGenForCausalLM
    GptOssForCausalLM GlmForCausalLM SmolLM3ForCausalLM HeliumForCausalLM DiffLlamaForCausalLM
"""
# What configurations that have them by these names are given, beside `_TEXT`.
_MORE = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "d_model": 32,
    "n_positions": 64,
    "ffn_dim": 64,
    "num_layers": 2,
    "attention_heads": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_size": 16,
    "rotary_dim": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "word_embed_proj_dim": 32,
}
_PICTURES = """
    resnet18 resnext50_32x4d densenet121 squeezenet1_1 mobilenet_v2 mobilenet_v3_small
    shufflenet_v2_x0_5 mnasnet0_5 efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny swin_t
    swin_v2_t
"""
_SEGMENTATION = "fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"
_TORCHVISION = {
    **dict.fromkeys(
        (*_PICTURES.split(), *_SEGMENTATION.split()),
        (3, 64, 64),
    ),
    "googlenet": (3, 128, 128),
    "maxvit_t": (3, 224, 224),
    **dict.fromkeys(("r3d_18", "r2plus1d_18", "swin3d_t"), (3, 16, 64, 64)),
    "mvit_v2_s": (3, 16, 224, 224),
}


class Case(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]  # a tuple, or a dict by name


def torchvision() -> Iterator[Case]:
    import torchvision

    for name, shape in _TORCHVISION.items():
        without = {"weights_backbone": None} if name in _SEGMENTATION.split() else {}
        make = partial(torchvision.models.get_model, name, num_classes=10, weights=None, **without)
        yield Case(name, make, partial(_of_images, *shape))


def _of_images(*shape: int) -> tuple[torch.Tensor]:
    return (torch.randn(2, *shape),)


def timm() -> Iterator[Case]:
    """A small model of each of its modules."""
    import timm

    for module in timm.list_modules():
        sizes: dict[str, float] = {}
        for name in timm.list_models(module=module):
            sizes[name] = _size(timm, name)
            if sizes[name] < _SMALL:
                break
        name = min(sizes, key=lambda one: sizes[one], default="")
        if sizes.get(name, _LARGEST) >= _LARGEST:
            continue
        given = (timm.get_pretrained_cfg(name) or timm.models.generate_default_cfgs({})).input_size[-1]
        found = _smallest(timm, name, given)
        if found is not None:
            make, side = found
            yield Case(name, make, partial(_of_images, 3, side, side))


def _size(timm: Any, name: str) -> float:
    try:
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=10)
    except Exception:  # needs another package, or numbers
        return float("inf")
    return sum(p.numel() for p in model.parameters())


def _smallest(timm: Any, name: str, given: int) -> tuple[Callable[[], nn.Module], int] | None:
    """A model for the smallest images that it takes, and their side."""
    for side in (64, 96, 128, 160, 192, given):
        for settings in ({"img_size": side}, {}):
            make = partial(timm.create_model, name, num_classes=10, **settings)
            try:
                with torch.no_grad():
                    make().eval()(torch.randn(2, 3, side, side))
            except Exception:  # too small
                continue
            return make, side
    return None


def transformers() -> Iterator[Case]:
    import transformers as T

    for name in _LANGUAGE_MODELS.split():
        kind = getattr(T, name)
        names = {
            key for base in kind.config_class.__mro__ for key in getattr(base, "__annotations__", {})
        }
        config = kind.config_class(**_TEXT, **{k: v for k, v in _MORE.items() if k in names})
        yield Case(name, partial(kind, config), _text)

    def vision(name: str, **settings: Any) -> Case:
        kind = getattr(T, name)
        config = kind.config_class(**_VISION, **settings)
        return Case(name, partial(kind, config), lambda: {"pixel_values": torch.randn(2, 3, 32, 32)})

    yield vision("ViTForImageClassification")
    yield vision("DeiTForImageClassification")
    yield vision("BeitForImageClassification", use_relative_position_bias=True)
    yield vision("Dinov2ForImageClassification")
    yield vision("DINOv3ViTModel")
    decoder = {"decoder_hidden_size": 16, "decoder_num_attention_heads": 4}
    yield vision("ViTMAEForPreTraining", decoder_intermediate_size=32, **decoder)
    windows = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    for name in ("SwinForImageClassification", "Swinv2ForImageClassification"):
        kind = getattr(T, name)
        config = kind.config_class(image_size=32, patch_size=2, **windows)
        yield Case(name, partial(kind, config), lambda: {"pixel_values": torch.randn(2, 3, 32, 32)})
    sides = {"d_model": 32, "vocab_size": 97, "pad_token_id": 0, "decoder_start_token_id": 0}
    t5 = T.T5Config(d_kv=8, d_ff=64, num_layers=2, num_heads=4, **sides)
    yield Case("T5ForConditionalGeneration", partial(T.T5ForConditionalGeneration, t5), _text)
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
              (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    bart = T.BartConfig(max_position_embeddings=64, eos_token_id=2, **layers, **sides)
    yield Case("BartForConditionalGeneration", partial(T.BartForConditionalGeneration, bart), _text)
    whisper = T.WhisperConfig(
        num_mel_bins=8, max_source_positions=20, eos_token_id=2, bos_token_id=1, **layers, **sides
    )
    yield Case(
        "WhisperForConditionalGeneration",
        partial(T.WhisperForConditionalGeneration, whisper),
        lambda: {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 90, (2, 10))},
    )
    towers = {
        "text_config": _TEXT | {"max_position_embeddings": 32},
        "vision_config": _VISION,
    }
    for name in ("CLIPModel", "SiglipModel"):
        kind = getattr(T, name)
        yield Case(name, partial(kind, kind.config_class(**towers)), _captioned)
    conv = {"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
    conv |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
    for name in ("Wav2Vec2ForSequenceClassification", "HubertModel", "WavLMModel"):
        kind = getattr(T, name)
        config = kind.config_class(**conv, **{k: _TEXT[k] for k in list(_TEXT)[:4]})
        yield Case(name, partial(kind, config), lambda: {"input_values": torch.randn(2, 800)})


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 90, (2, 16)), "labels": torch.randint(3, 90, (2, 16))}


def _captioned() -> dict[str, Any]:
    given = {"input_ids": torch.randint(3, 90, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32)}
    return given | {"return_loss": True}


def diffusers() -> Iterator[Case]:
    import diffusers as D

    def image(channels: int, side: int, **more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "timestep": torch.tensor([3, 5]),
            **more,
            "": torch.randn(2, channels, side, side),
        }

    def named(name: str, inputs: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return lambda: {key or name: x for key, x in inputs().items()}

    two = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1}
    text = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    yield Case(
        "UNet2DModel",
        lambda: D.UNet2DModel(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **two,
        ),
        named("sample", image(3, 16)),
    )
    yield Case(
        "UNet2DConditionModel",
        lambda: D.UNet2DConditionModel(
            cross_attention_dim=16,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            **two,
        ),
        named("sample", image(4, 16, encoder_hidden_states=text)),
    )
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    yield Case(
        "DiTTransformer2DModel",
        lambda: D.DiTTransformer2DModel(in_channels=4, patch_size=2, num_embeds_ada_norm=10, **heads),
        named("hidden_states", image(4, 8, class_labels=torch.tensor([1, 2]))),
    )
    yield Case(
        "SD3Transformer2DModel",
        lambda: D.SD3Transformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
            **heads,
        ),
        named("hidden_states", image(4, 8, encoder_hidden_states=text, pooled_projections=text[:, 0])),
    )
    yield Case(
        "AutoencoderKL",
        lambda: D.AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
        ),
        lambda: {"sample": torch.randn(2, 3, 16, 16)},
    )


def torch_geometric() -> Iterator[Case]:
    from torch_geometric import nn as graphs

    edges = torch.randint(0, 20, (2, 60), generator=torch.Generator().manual_seed(0))
    kinds = edges[0] % 3
    for name in ("GCN", "GAT", "GraphSAGE", "GIN"):
        kind = getattr(graphs, name)
        yield Case(name, partial(kind, 8, 16, 2, 3), lambda: (torch.randn(20, 8), edges))
    for name, settings in {
        "TransformerConv": (8, 16),
        "GENConv": (8, 16),
        "ARMAConv": (8, 16),
        "ChebConv": (8, 16, 3),
        "TAGConv": (8, 16),
        "ResGatedGraphConv": (8, 16),
        "LEConv": (8, 16),
        "GeneralConv": (8, 16),
    }.items():
        kind = getattr(graphs, name)
        yield Case(name, partial(kind, *settings), lambda: (torch.randn(20, 8), edges))
    for name, more in {"RGCNConv": {}, "RGCNConv, bases": {"num_bases": 2}}.items():
        yield Case(
            name, partial(graphs.RGCNConv, 8, 16, 3, **more), lambda: (torch.randn(20, 8), edges, kinds)
        )


LIBRARIES = {one.__name__: one for one in (torchvision, timm, transformers, diffusers, torch_geometric)}
