"""From prompts to pictures, without a run's folders: what ``python -m ssd_train.draw`` and scripts call."""

from collections.abc import Sequence
from pathlib import Path

from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from torch import Tensor
from yaml import YAMLError

from ssd_train import config
from ssd_train.backbones.base import Backbone
from ssd_train.decoding.engine import Decoded, Decoder
from ssd_train.decoding.trace import Trace
from ssd_train.distributions import Sampling
from ssd_train.heads.export import load_heads
from ssd_train.heads.predictors import Heads
from ssd_train.runs.decoders import bound
from ssd_train.runs.run import Run


class Painter:
    """A backbone with its sampling settings and heads, ready to draw. ::

    painter = Painter("tiny")
    images, trace = painter(["two red squares", "a blue circle"], decoder="ssd_corrected", seed=0)
    """

    def __init__(
        self,
        model: str | Backbone = "tiny",
        heads: str | Path | Heads | None = None,
        settings: Sequence[str] = (),
        sampling: Sampling | None = None,
    ):
        """``model`` is the name of a model's yaml, with further ``settings`` as on the command line ("device=cuda",
        "model.backbone.dtype=bfloat16", "decode.batch_size=8" to have memory for eight checked), or a loaded backbone.
        ``heads`` are a folder, a hub id, or loaded; default: those that ship with the model, if any do. ``sampling``
        defaults to the model's. Raises ValueError or OSError that says what to mend."""
        shipped = None
        if isinstance(model, Backbone):
            if settings:
                raise ValueError(f"settings={list(settings)} are for a model that is named; {model.name} is loaded")
            self.backbone, self.sampling = model, sampling or Sampling()
        else:
            if model not in config.choices("model"):
                raise ValueError(f"there is no model {model!r}; expected one of {', '.join(config.choices('model'))}")
            run = Run(config.compose([f"+model={model}", "stages=[decode]", "decode.batch_size=1", *settings]))
            try:
                self.backbone, self.sampling = run.backbone, sampling or run.sampling
            except InstantiationException as error:
                raise ValueError(str(error.__cause__ or error)) from error
            shipped = run.cfg.model.get("heads")
        heads = shipped if heads is None else heads
        self.heads = heads if heads is None or isinstance(heads, Heads) else load_heads(heads, self.backbone)
        self._decoders: dict[str, Decoder] = {}

    def __call__(
        self, prompts: Sequence[str], decoder: str | Path | Decoder | None = None, seed: int | Sequence[int] = 0
    ) -> tuple[list[Image.Image], Trace]:
        """A picture a prompt, and what its decoding did. See :meth:`decode` and :meth:`pictures`."""
        decoded = self.decode(prompts, decoder, seed)
        return self.pictures(decoded.tokens), decoded.trace

    def decode(
        self, prompts: Sequence[str], decoder: str | Path | Decoder | None = None, seed: int | Sequence[int] = 0
    ) -> Decoded:
        """All prompts as one batch. ``decoder`` is the name of a decoder's yaml, the path of another one, or a decoder;
        default: :meth:`best`. A ``seed``, for all prompts or one each, with its prompt decides the picture: it is the
        same alone and in any batch, up to rounding. Raises ValueError for a prompt that is blank or that the backbone
        cannot read, and for a decoder that does not fit."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for number, prompt in enumerate(prompts, 1):
            if not prompt.strip():
                raise ValueError(f"prompt {number} is empty; expected words")
        seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
        if not prompts or len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; expected a prompt at least, a seed each")
        if not all(0 <= each < 2**63 for each in seeds):
            raise ValueError(f"seeds are {seeds}; expected whole numbers from 0 to 2**63 - 1")
        context = self.backbone.encode_prompts(prompts)
        return self.decoder(decoder)(self.backbone, context, seeds, self.sampling)

    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Of tokens [B, h, w]. Raises FileNotFoundError if something that makes pixels is not there."""
        return [Image.fromarray(image) for image in self.backbone.decode_pixels(tokens).numpy()]

    def best(self) -> str:
        """The exact decoder that takes the fewest passes with what there is."""
        if self.heads is None:
            return "sjd_coupled"
        return "ssd_corrected" if self.heads.corrector else "ssd_coupled"

    def decoder(self, decoder: str | Path | Decoder | None = None) -> Decoder:
        """Bound to the backbone and the heads. Raises ValueError if it is none, or does not fit."""
        if isinstance(decoder, Decoder):
            return decoder.bind(self.backbone, self.heads)
        name = self.best() if decoder is None else str(decoder)
        if name not in self._decoders:
            self._decoders[name] = bound(name, self._node(name), self.backbone, self.heads)
        return self._decoders[name]

    def _node(self, name: str):
        """A decoder's settings, from its yaml, which may refer to the number of heads."""
        known = config.choices("decoder")
        heads = [f"head.k_horizontal={self.heads.spec.k_horizontal}"] if self.heads else []
        if name in known:
            return config.compose([f"decoder=[{name}]", *heads]).decoder[name]
        if not name.endswith((".yaml", ".yml")):
            raise ValueError(f"there is no decoder {name!r}; expected one of {', '.join(known)}, or a yaml's path")
        try:
            cfg = config.compose(["decoder=[ar]", *heads])
            cfg.decoder = {"own": OmegaConf.load(name)}
        except (OSError, YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"{name} cannot be read as a decoder's yaml: {' '.join(str(error).split())}") from error
        return cfg.decoder["own"]
