"""Train a UNet that segments photographs whose rows and columns are sharded over a 2-D mesh.

    pip install -e ".[examples]"
    python examples/sharded_unet.py                          # 4 simulated devices
    torchrun --nproc-per-node 4 examples/sharded_unet.py 40

The photographs are the two of scikit-learn; the classes of their pixels are clusters of smoothed
colours. Rank 0 reads them and scatters uneven parts. The UNet is written for one device, and
`fs.partition` runs the training step with every activation sharded in space: convolutions, pooling
and interpolation exchange halos, norms and the loss send sums, and gradients of weights are summed.
Losses are compared with one device. The picture has the part of each rank in a frame of its own:
the photographs above, their classes below.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fshard as fs
from fshard import P

CLASSES, CHANNELS, RATE = 4, 8, 0.05
FRAMES = ((228, 26, 28), (55, 126, 184), (77, 175, 74), (255, 127, 0))
GAP = 6


class Block(nn.Module):
    """Two convolutions with group norms."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(n, outs, 3, padding=1) for n in (ins, outs)])
        self.norms = nn.ModuleList([nn.GroupNorm(4, outs) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same height and width."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.silu(norm(conv(x)))
        return x


class UNet(nn.Module):
    """Two levels down by pooling, and up again by interpolation beside the features before."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        widths = 3, channels, 2 * channels, 4 * channels
        levels = [*itertools.pairwise(widths)]
        self.downs = nn.ModuleList([Block(ins, outs) for ins, outs in levels])
        self.ups = nn.ModuleList([Block(ins + outs, ins) for ins, outs in levels[1:]])
        self.last = nn.Conv2d(channels, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes, `(batch, classes, height, width)`."""
        skips = []
        for down in self.downs:
            x = down(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for up, skip in zip(reversed(self.ups), reversed(skips[:-1]), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([skip, x], 1))
        logits: Tensor = self.last(x)
        return logits


def photographs(scale: int) -> Tensor:
    """Return scikit-learn's photographs, `(2, 3, height, width)`, reduced by `scale`."""
    try:
        from sklearn.datasets import load_sample_images

        images = load_sample_images().images
    except ImportError as error:
        sys.exit(f'{error}: pip install -e ".[examples]" installs scikit-learn and Pillow')
    x = torch.stack([torch.from_numpy(image.copy()) for image in images]).permute(0, 3, 1, 2)
    return F.avg_pool2d(x.double() / 255, scale)


def classes_of(images: Tensor) -> Tensor:
    """Return the cluster of the smoothed colour at each pixel, by ten steps of k-means."""
    smooth = F.avg_pool2d(images, 5, stride=1, padding=2, count_include_pad=False)
    colours = smooth.permute(0, 2, 3, 1).reshape(-1, 3)
    order = colours.sum(1).argsort()
    centers = colours[order[:: len(order) // CLASSES][:CLASSES]]
    for _ in range(10):
        nearest = torch.cdist(colours, centers).argmin(1)
        centers = torch.stack([colours[nearest == i].mean(0) for i in range(CLASSES)])
    return nearest.view(smooth[:, 0].shape)


def train_step(model: UNet, params: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """Take a step of gradient descent in place, and return the loss before."""
    logits = torch.func.functional_call(model, params, (images,))
    loss = F.cross_entropy(logits, labels)
    grads = torch.autograd.grad(loss, list(params.values()))
    with torch.no_grad():
        for param, grad in zip(params.values(), grads, strict=True):
            param.sub_(RATE * grad)
    return loss.detach()


def new_params(model: UNet) -> dict[str, Tensor]:
    """Return copies of the model's parameters."""
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def save_picture(path: str, images: Tensor, classes: Tensor, spec: fs.Spec) -> None:
    """Draw the photographs and below them their classes, with a frame around each rank's part."""
    from PIL import Image, ImageDraw

    colours = torch.stack([images.mean(1)[classes == i].mean() * torch.ones(3, dtype=torch.float64)
                           for i in range(CLASSES)])  # fmt: skip
    hues = torch.tensor([[0.1, 0.2, 0.5], [0.2, 0.5, 0.2], [0.8, 0.5, 0.2], [0.9, 0.9, 0.8]])
    painted = (0.3 * colours + 0.7 * hues.double())[classes].permute(0, 3, 1, 2)
    rows = [*images], [*painted]
    height, width = images.shape[-2] + 3 * GAP, images.shape[-1] + 3 * GAP
    canvas = Image.new("RGB", (2 * width, 2 * height), "white")
    draw = ImageDraw.Draw(canvas)
    for rank in spec.mesh.ranks:
        h, w = spec.index(rank)[-2:]
        coords = spec.mesh.coords(rank)
        for i, row in enumerate(rows):
            for j, picture in enumerate(row):
                top = i * height + h.start + GAP * (1 + coords["h"])
                left = j * width + w.start + GAP * (1 + coords["w"])
                part = (picture[:, h, w].clamp(0, 1) * 255).byte().permute(1, 2, 0).contiguous()
                canvas.paste(Image.fromarray(part.numpy()), (left, top))
                corners = left - 2, top - 2, left + part.shape[1] + 1, top + part.shape[0] + 1
                draw.rectangle(corners, outline=FRAMES[rank % len(FRAMES)], width=2)
    canvas.resize((4 * width, 4 * height), Image.Resampling.NEAREST).save(path)


def main(steps: int = 40, scale: int = 4, path: str = "sharded_unet.png") -> int:
    """Train, print the losses and save the picture; return 1 if losses differ from one device's."""
    mesh = fs.Mesh(h=2, w=2)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    height, width = 427 // scale, 640 // scale
    rows, columns = (height // 2 + 3, height - height // 2 - 3), (width // 3, width - width // 3)
    spec = fs.Spec(mesh, P(None, None, "h", "w"), shape=(2, 3, height, width), dtype=torch.float64,
                   sizes={2: rows, 3: columns})  # fmt: skip
    labels_spec = fs.Spec(mesh, P(None, "h", "w"), shape=(2, height, width), dtype=torch.int64,
                          sizes={1: rows, 2: columns})  # fmt: skip
    images = photographs(scale) if rank == 0 else None
    labels = None if images is None else classes_of(images)
    sharded, sharded_labels = fs.scatter(images, spec), fs.scatter(labels, labels_spec)

    torch.manual_seed(0)
    model = UNet().double()
    params = new_params(model)
    step = fs.partition(lambda p, x, y: train_step(model, p, x, y), mesh=mesh, params=P(),
                        in_specs=(spec, labels_spec), out_specs=P())  # fmt: skip
    predict = fs.partition(lambda p, x: torch.func.functional_call(model, p, (x,)).argmax(1),
                           mesh=mesh, params=P(), in_specs=spec)  # fmt: skip
    losses = []
    for _ in range(steps):
        with fs.comm_log() as log:
            losses.append(fs.unshard(step(params, sharded, sharded_labels)).item())
    classes = fs.unshard(predict(params, sharded))
    if images is None or labels is None:
        return 0
    print(f"images {spec}")
    print(log)
    alone = new_params(model)
    expected = [train_step(model, alone, images, labels).item() for _ in range(steps)]
    for i in (*range(0, steps - 1, max(steps // 6, 1)), steps - 1):
        print(f"step {i:3d}  loss {losses[i]:.10f}")
    agreed = (classes == labels).double().mean().item()
    save_picture(path, images, classes, spec)
    print(f"{agreed:.0%} of the pixels have their class; the picture is {path}.")
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"Losses differ by at most {difference:.1e}.")
    return int(difference > 1e-7)  # rounding grows from step to step


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
