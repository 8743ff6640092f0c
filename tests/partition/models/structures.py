"""Differential equations, flows, codecs, operators, losses, and tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.partition.models.model_checks import Model
from tests.partition.models.zoo import (
    BATCH,
    COLUMNS,
    ROWS,
    Call,
    noise,
    register,
    text_of,
    words,
)


@register
def torchdiffeq_rk4() -> Model:
    from torchdiffeq import odeint

    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    times = torch.linspace(0, 1, 5, dtype=torch.float64)
    call = lambda net, y: odeint(lambda t, y: net(y), y, times, method="rk4")  # noqa: E731
    return Model(Call(net, call), {"y": noise(BATCH, 8)}, r"0\.", r"2\.weight")


@register
def torchdiffeq_adjoint() -> Model:
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    times = torch.linspace(0, 1, 3, dtype=torch.float64)

    def call(field: nn.Module, y: Tensor) -> Tensor:
        # The backward pass evaluates the field after `functional_call` has ended.
        params = dict(field.named_parameters())
        dynamics = lambda t, y: torch.func.functional_call(field, params, (t, y))  # noqa: E731
        return odeint_adjoint(dynamics, y, times, method="euler",
                              adjoint_params=tuple(params.values()))  # fmt: skip

    return Model(Call(Field(), call), {"y": noise(BATCH, 8)})


@register
def torchdiffeq_dopri5() -> Model:
    from torchdiffeq import odeint

    times = torch.linspace(0, 1, 3, dtype=torch.float64)
    call = lambda net, y: odeint(lambda t, y: net(y), y, times)  # noqa: E731
    return Model(Call(nn.Linear(8, 8), call), {"y": noise(BATCH, 8)})


@register
def lightly_simclr() -> Model:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), SimCLRProjectionHead(16, 16, 8))
    loss = NTXentLoss()
    call = lambda net, a, b: loss(net(a), net(b))  # noqa: E731
    return Model(Call(net, call), {"a": noise(BATCH, 12), "b": noise(BATCH, 12) + 0.1})


@register
def lightly_barlow_twins() -> Model:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    loss = BarlowTwinsLoss()
    call = lambda net, a, b: loss(net(a), net(b))  # noqa: E731
    return Model(
        Call(BarlowTwinsProjectionHead(12, 16, 8), call),
        {"a": noise(BATCH, 12), "b": noise(BATCH, 12) * 0.9 + 0.1},
    )


@register
def lightly_vicreg() -> Model:
    from lightly.loss import VICRegLoss
    from lightly.models.modules.heads import VICRegProjectionHead

    loss = VICRegLoss()
    call = lambda net, a, b: loss(net(a), net(b))  # noqa: E731
    return Model(
        Call(VICRegProjectionHead(12, 16, 8), call),
        {"a": noise(BATCH, 12), "b": noise(BATCH, 12) * 0.9 + 0.1},
    )


@register
def lightly_dino() -> Model:
    from lightly.models.modules import DINOProjectionHead

    return Model(DINOProjectionHead(12, 16, 8, 16), {"x": noise(BATCH, 12)})


@register
def mambapy() -> Model:
    from mambapy.mamba import Mamba, MambaConfig

    return Model(
        Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4, pscan=False)),
        {"x": noise(BATCH, 8, 16)},
        r"in_proj\.",
        r"out_proj\.weight",
    )


@register
def mambapy_pscan() -> Model:
    from mambapy.mamba import Mamba, MambaConfig

    return Model(Mamba(MambaConfig(d_model=16, n_layers=1, d_state=4)), {"x": noise(BATCH, 8, 16)})


@register
def vector_quantize() -> Model:
    from vector_quantize_pytorch import VectorQuantize

    return Model(VectorQuantize(dim=8, codebook_size=16, decay=0.8), {"x": noise(BATCH, 6, 8)})


@register
def residual_fsq() -> Model:
    from vector_quantize_pytorch import FSQ

    return Model(FSQ(levels=[4, 3, 3], dim=8), {"z": noise(BATCH, 6, 8)})


@register
def lookup_free_quantization() -> Model:
    from vector_quantize_pytorch import LFQ

    return Model(LFQ(codebook_size=16, dim=8), {"x": noise(BATCH, 6, 8)})


@register
def soft_moe() -> Model:
    from st_moe_pytorch import MoE

    return Model(MoE(dim=8, num_experts=4, gating_top_n=2), {"x": noise(BATCH, 8, 8)})


@register
def tab_transformer() -> Model:
    from tab_transformer_pytorch import FTTransformer

    module = FTTransformer(categories=(4, 5), num_continuous=3, dim=16, dim_out=1, depth=1, heads=4)
    return Model(
        module,
        {"x_categ": words(BATCH, 2, vocabulary=8) % 4, "x_numer": noise(BATCH, 3)},
        COLUMNS,
        ROWS,
    )


@register
def rtdl_ft_transformer() -> Model:
    from rtdl_revisiting_models import FTTransformer

    module = FTTransformer(
        n_cont_features=3,
        cat_cardinalities=[4, 5],
        d_out=1,
        n_blocks=1,
        d_block=16,
        attention_n_heads=4,
        attention_dropout=0.1,
        ffn_d_hidden_multiplier=2.0,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )
    return Model(module, {"x_cont": noise(BATCH, 3), "x_cat": words(BATCH, 2, vocabulary=8) % 4})


@register
def siren() -> Model:
    from siren_pytorch import SirenNet

    return Model(SirenNet(dim_in=2, dim_hidden=16, dim_out=3, num_layers=3), {"x": noise(BATCH, 2)})


@register
def fourier_neural_operator() -> Model:
    from neuralop.models import FNO

    return Model(
        FNO(n_modes=(4, 4), hidden_channels=8, in_channels=3, out_channels=1, n_layers=2),
        {"x": noise(BATCH, 3, 8, 8)},
    )


@register
def open_clip() -> Model:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    module = CLIP(
        16,
        {"image_size": 32, "layers": 2, "width": 16, "patch_size": 8, "head_width": 4},
        {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 4, "layers": 2},
    )
    loss = ClipLoss()
    call = lambda module, image, text: loss(*module(image, text))  # noqa: E731
    return Model(
        Call(module, call),
        {"image": noise(BATCH, 3, 32, 32), "text": words(BATCH, 8)},
        r"c_fc\.",
        r"c_proj\.weight",
    )


@register
def liquid_time_constant() -> Model:
    from ncps.torch import LTC

    return Model(LTC(4, 8), {"input": noise(BATCH, 5, 4)})


@register
def closed_form_continuous() -> Model:
    from ncps.torch import CfC
    from ncps.wirings import AutoNCP

    return Model(CfC(4, AutoNCP(12, 3)), {"input": noise(BATCH, 5, 4)})


@register
def zuko_nsf() -> Model:
    from zuko.flows import NSF

    call = lambda flow, x: flow().log_prob(x)  # noqa: E731
    return Model(Call(NSF(3, transforms=2, hidden_features=(16, 16)), call), {"x": noise(BATCH, 3)})


@register
def zuko_maf() -> Model:
    from zuko.flows import MAF

    call = lambda flow, x, c: flow(c).log_prob(x)  # noqa: E731
    return Model(
        Call(MAF(3, 2, transforms=2, hidden_features=(16, 16)), call),
        {"x": noise(BATCH, 3), "c": noise(BATCH, 2)},
    )


@register
def nflows_realnvp() -> Model:
    from nflows.flows.realnvp import SimpleRealNVP

    call = lambda flow, x: flow.log_prob(x)  # noqa: E731
    return Model(Call(SimpleRealNVP(4, 16, 2, 1), call), {"x": noise(BATCH, 4)})


@register
def temporal_convolutions() -> Model:
    from pytorch_tcn import TCN

    return Model(TCN(4, [8, 8], kernel_size=2, dropout=0.1), {"x": noise(BATCH, 4, 12)})


@register
def kolmogorov_arnold() -> Model:
    from kan import KAN

    module = KAN(width=[3, 4, 1], grid=3, k=3, auto_save=False, device="cpu")
    module.speed() if hasattr(module, "speed") else None
    return Model(module, {"x": noise(BATCH, 3)})


@register
def conformer() -> Model:
    from conformer import Conformer

    return Model(
        Conformer(16, depth=1, dim_head=4, heads=4, ff_mult=2, conv_kernel_size=3),
        {"x": noise(BATCH, 8, 16)},
        COLUMNS,
        ROWS,
    )


@register
def encodec() -> Model:
    from encodec.modules import SEANetDecoder, SEANetEncoder

    options = {"dimension": 8, "n_filters": 2, "ratios": [2, 2], "lstm": 1}
    net = nn.Sequential(SEANetEncoder(**options), SEANetDecoder(**options))
    return Model(Call(net, lambda net, x: net(x)), {"x": noise(BATCH, 1, 32)})


@register
def vocos() -> Model:
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    net = nn.Sequential(VocosBackbone(8, 16, 32, 2), ISTFTHead(16, 16, 4))
    return Model(Call(net, lambda net, x: net(x)), {"x": noise(BATCH, 8, 12)})


@register
def whisper() -> Model:
    from whisper.model import ModelDimensions, Whisper

    module = Whisper(ModelDimensions(8, 6, 16, 4, 1, 32, 8, 16, 4, 1))
    return Model(
        module,
        {"mel": noise(BATCH, 8, 12), "tokens": words(BATCH, 8)},
        r"(query|key|value|mlp\.0)\.",
        r"(out|mlp\.2)\.weight",
    )


@register
def megabyte() -> Model:
    from MEGABYTE_pytorch import MEGABYTE

    module = MEGABYTE(
        num_tokens=32, dim=(16, 8), max_seq_len=(4, 2), depth=(1, 1), dim_head=4, heads=2
    )
    return Model(module, {"ids": words(BATCH, 8), "return_loss": True})


@register
def se3_transformer() -> Model:
    from se3_transformer_pytorch import SE3Transformer

    module = SE3Transformer(dim=8, heads=2, depth=1, dim_head=4, num_degrees=2, valid_radius=10)
    return Model(
        module, {"feats": noise(2, 6, 8), "coors": noise(2, 6, 3), "mask": torch.ones(2, 6).bool()}
    )


@register
def e3nn() -> Model:
    from e3nn import o3

    module = o3.FullyConnectedTensorProduct("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o")
    return Model(
        Call(module, lambda m, x, y: m(x, y)), {"x": noise(BATCH, 8), "y": noise(BATCH, 4)}
    )


@register
def axial_attention() -> Model:
    from axial_attention import AxialAttention

    return Model(
        AxialAttention(dim=8, dim_index=1, heads=2, num_dimensions=2), {"x": noise(BATCH, 8, 6, 6)}
    )


@register
def byol() -> Model:
    from byol_pytorch import BYOL

    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU())
    module = BYOL(
        net,
        image_size=8,
        hidden_layer=-1,
        projection_size=8,
        projection_hidden_size=16,
        augment_fn=nn.Identity(),
        sync_batchnorm=False,
    )
    return Model(module, {"x": noise(BATCH, 3, 8, 8)})


@register
def ecapa_tdnn() -> Model:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    return Model(
        ECAPA_TDNN(
            8,
            channels=[16] * 5,
            attention_channels=8,
            lin_neurons=8,
            res2net_scale=4,
            se_channels=8,
        ),
        {"x": noise(BATCH, 12, 8)},
    )


@register
def tensorized_linear() -> Model:
    import tltorch

    return Model(
        tltorch.FactorizedLinear((4, 4), (4, 2), bias=True, factorization="cp", rank=3),
        {"x": noise(BATCH, 16)},
    )


@register
def gpytorch_exact() -> Model:
    import gpytorch

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=3))
    return Model(Call(kernel, lambda k, x: k(x).to_dense()), {"x": noise(BATCH, 3)})


@register
def titans_memory() -> Model:
    from titans_pytorch import NeuralMemory

    return Model(NeuralMemory(dim=8, chunk_size=4), {"seq": noise(BATCH, 8, 8)})


@register
def product_key_memory() -> Model:
    from product_key_memory import PKM

    return Model(PKM(dim=16, heads=2, dim_head=8, num_keys=4, topk=2), {"x": noise(BATCH, 8, 16)})


@register
def efficientnet_pytorch() -> Model:
    from efficientnet_pytorch import EfficientNet

    return Model(
        EfficientNet.from_name("efficientnet-b0", num_classes=10, image_size=32),
        {"inputs": noise(BATCH, 3, 32, 32)},
    )


@register
def kornia_hardnet() -> Model:
    import kornia.feature as features

    return Model(features.HardNet(), {"input": noise(BATCH, 1, 32, 32)})


@register
def palm() -> Model:
    from palm_rlhf_pytorch import PaLM

    return text_of(PaLM(num_tokens=32, dim=16, depth=1, heads=4, dim_head=4))


@register
def sru() -> Model:
    from sru import SRU

    return Model(SRU(8, 8, num_layers=2), {"input": noise(6, BATCH, 8)})


@register
def lpips() -> Model:
    import lpips as package

    module = package.LPIPS(pretrained=False, pnet_rand=True, net="squeeze", verbose=False)
    return Model(module, {"in0": noise(BATCH, 3, 64, 64), "in1": noise(BATCH, 3, 64, 64) + 0.1})
