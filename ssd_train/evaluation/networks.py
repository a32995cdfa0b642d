"""FID, KID and CLIP score by torchmetrics (the extra ``ssd_train[evaluate]``), with weights from local files."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

KID_SUBSET = 1000  # pictures, as published (Binkowski et al., arXiv 1801.01401)


def load_extractor(path: str, device: torch.device) -> nn.Module:
    """Pictures uint8 [B, 3, H, W] -> features [B, D].

    ``path`` is a TorchScript module (such as the inception-2015-12-05.pt of StyleGAN), or the state dict of
    torch-fidelity's Inception, for which that package must be installed. Raises ValueError for anything else.
    """
    if not Path(path).is_file():
        raise ValueError(f"suite.inception={path}: there is no such file; expected TorchScript or a state dict")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(path, map_location=device).eval()
    except RuntimeError:
        return _inception(path).to(device)
    arguments = [argument.name for argument in module.forward.schema.arguments]
    return _Features(module) if "return_features" in arguments else module


class _Features(nn.Module):
    """StyleGAN's Inception, which gives class probabilities unless asked."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, pictures: Tensor) -> Tensor:
        return self.module(pictures, return_features=True)


def _inception(path: str) -> nn.Module:
    from torchmetrics.image.fid import NoTrainInceptionV3

    try:
        torch.load(path, map_location="cpu", weights_only=True)
        return NoTrainInceptionV3("inception-v3-compat", ["2048"], path)
    except Exception as error:
        raise ValueError(
            f"suite.inception={path} is neither TorchScript nor a state dict of torch-fidelity's Inception with that "
            f"package installed ({error})"
        ) from error


@torch.inference_mode()
def features(extractor: nn.Module, pictures: Iterable[Tensor], device: torch.device) -> Tensor:
    """Features [N, D], on the CPU, of batches of pictures uint8 [B, H, W, 3]."""
    return torch.cat([extractor(batch.permute(0, 3, 1, 2).to(device)).flatten(1).cpu() for batch in pictures])


def frechet_inception_distance(real: Tensor, fake: Tensor) -> float:
    """FID (Heusel et al., arXiv 1706.08500) between features [N, D] and [M, D]."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    return float(_updated(FrechetInceptionDistance(_identity(real)), real, fake).compute())


def kernel_inception_distance(real: Tensor, fake: Tensor, seed: int) -> float:
    """KID, the mean over random subsets, between features [N, D] and [M, D]."""
    from torchmetrics.image.kid import KernelInceptionDistance

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", UserWarning)  # that it keeps all features
        torch.manual_seed(seed)
        metric = KernelInceptionDistance(_identity(real), subset_size=min(KID_SUBSET, len(real), len(fake)))
        return float(_updated(metric, real, fake).compute()[0])


def _identity(real: Tensor) -> nn.Module:
    """The extractor of what are features already."""
    module = nn.Identity()
    module.num_features = real.shape[1]
    return module


def _updated(metric, real: Tensor, fake: Tensor):
    metric.update(real, real=True)
    metric.update(fake, real=False)
    return metric


class _Clip(nn.Module):
    """transformers' CLIPModel as torchmetrics calls it: its methods give the projected features themselves."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config

    def get_image_features(self, pixels: Tensor) -> Tensor:
        return _pooled(self.model.get_image_features(pixels))

    def get_text_features(self, ids: Tensor, attend: Tensor) -> Tensor:
        return _pooled(self.model.get_text_features(ids, attend))


def _pooled(output) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output


def load_clip(path: str, device: torch.device) -> tuple[nn.Module, object]:
    """CLIPModel and its processor, from a folder or the hub. Raises ValueError for what is none."""
    from transformers import CLIPModel, CLIPProcessor

    try:
        return _Clip(CLIPModel.from_pretrained(path).to(device).eval()), CLIPProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"suite.clip={path} holds no CLIPModel with its processor ({error})") from error


@torch.inference_mode()
def clip_score(clip: tuple, batches: Iterable[tuple[Tensor, Sequence[str]]], device: torch.device) -> float:
    """100 times the mean cosine of picture and caption, at least 0 (Hessel et al., arXiv 2104.08718), over batches of
    pictures uint8 [B, H, W, 3] and B captions. Captions end at CLIP's 77th token."""
    from torchmetrics.multimodal.clip_score import CLIPScore

    metric = CLIPScore(lambda: clip)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Encountered caption longer", UserWarning)  # the report says it
        for pictures, captions in batches:
            metric.update(list(pictures.permute(0, 3, 1, 2).to(device)), list(captions))
    return float(metric.compute())
