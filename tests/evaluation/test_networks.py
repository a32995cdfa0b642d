"""FID, KID and CLIP score are torchmetrics' own values, with small random networks from local files."""

import pytest
import torch
from small_networks import Extractor, tiny_clip
from torchmetrics.functional.multimodal import clip_score as reference_clip_score
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance
from transformers import CLIPModel

from ssd_train.evaluation import networks

CPU = torch.device("cpu")


class Classifier(Extractor):
    """Like StyleGAN's Inception."""

    def forward(self, pictures, return_features: bool = False):
        features = self.convolution(pictures / 255).flatten(2).amax(-1)
        return features if return_features else features.softmax(-1)


def pictures(n, seed):
    return torch.randint(0, 256, (n, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [Extractor, Classifier])
def test_fid_and_kid(kind, tmp_path):
    torch.jit.script(kind()).save(tmp_path / "extractor.pt")
    extractor = networks.load_extractor(str(tmp_path / "extractor.pt"), CPU)
    sets = pictures(24, 0), pictures(20, 1) // 2
    real, fake = (networks.features(extractor, images.split(7), CPU) for images in sets)
    reference = FrechetInceptionDistance(Extractor(), input_img_size=(3, 8, 8))
    kid = KernelInceptionDistance(Extractor(), subset_size=20)
    with torch.inference_mode():
        for metric in reference, kid:
            for images, is_real in zip(sets, (True, False), strict=True):
                metric.update(images.permute(0, 3, 1, 2), real=is_real)
    assert networks.frechet_inception_distance(real, fake) == pytest.approx(float(reference.compute()), rel=1e-4)
    assert networks.frechet_inception_distance(real, real) == pytest.approx(0, abs=1e-4)
    torch.manual_seed(3)
    expected = float(kid.compute()[0])
    torch.manual_seed(4)
    state = torch.get_rng_state()
    assert networks.kernel_inception_distance(real, fake, seed=3) == pytest.approx(expected, rel=1e-4)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file_that_is_no_extractor_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="neither TorchScript nor a state dict of torch-fidelity's Inception"):
        networks.load_extractor(str(tmp_path / "weights.pth"), CPU)
    with pytest.raises(ValueError, match="there is no such file"):
        networks.load_extractor(str(tmp_path / "none.pt"), CPU)


def test_clip_score(tmp_path):
    """A caption counts up to CLIP's 77th token, as torchmetrics cuts it."""
    clip = networks.load_clip(str(tiny_clip(tmp_path)), CPU)
    images, captions = pictures(4, 0), ["a dog", "two cats", "a dog", "z" * 100]
    channels = list(images.permute(0, 3, 1, 2))
    with torch.inference_mode():
        inputs = clip[1](text=captions[:3], images=channels[:3], return_tensors="pt", padding=True)
        output = CLIPModel.from_pretrained(tmp_path).eval()(**inputs)
    cosines = (output.image_embeds * output.text_embeds).sum(-1)
    chosen = [i for i in range(3) if cosines[i] > 0]
    assert chosen, "a mean below 0 would be cut off"
    batches = [(images[i : i + 1], [captions[i]]) for i in chosen]
    assert networks.clip_score(clip, batches, CPU) == pytest.approx(100 * float(cosines[chosen].mean()), abs=1e-3)
    with pytest.warns(UserWarning, match="longer than max_position_embeddings=77"):
        own = float(reference_clip_score(channels, captions, lambda: clip))
    halves = [(images[:1], captions[:1]), (images[1:], captions[1:])]
    assert networks.clip_score(clip, halves, CPU) == pytest.approx(own, abs=1e-3)


def test_a_folder_without_clip_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"suite.clip=.* holds no CLIPModel"):
        networks.load_clip(str(tmp_path), CPU)
