"""What papers report on the suites, as facts to hold one's own table against."""

from typing import NamedTuple

SSD = "arXiv 2606.20543, as corrected on its authors' page"


class Published(NamedTuple):
    """Speed-ups are over the paper's own AR: of passes, and of seconds. ``suite`` is null where it is not stated on
    which prompts."""

    suite: str | None
    model: str
    method: str
    scores: dict[str, float]
    step_speedup: float | None
    wall_speedup: float | None
    source: str


_DPG = {  # method: (step speed-up, wall speed-up, overall) of each model
    "AR": [(1, 1, 84.23), (1, 1, 76.30), (1, 1, 78.69)],
    "SJD": [(1.81, 1.50, 84.01), (2.23, 1.58, 74.03), (2.24, 1.08, 78.38)],
    "GSD": [(3.07, 2.38, 82.97), (2.89, 2.52, 73.37), (3.46, 2.90, 77.57)],
    "LANTERN": [(1.17, 0.84, 84.07), (2.00, 1.63, 74.45), (2.16, 1.54, 76.12)],
    "ZipAR": [(2.76, 2.59, 83.78), (2.94, 2.64, 74.62), (5.41, 3.54, 73.36)],
    "SSD": [(7.20, 5.70, 83.40), (8.40, 7.35, 74.57), (14.34, 11.03, 76.03)],
}
_MODELS = "Janus-Pro-7B", "Lumina-mGPT-7B", "Emu3-8B"
_GENEVAL = {"AR": (0.77, 0.50, 0.45), "SSD": (0.73, 0.46, 0.40)}

PUBLISHED = [
    *(
        Published("geneval", model, method, {"overall": scores[i]}, *_DPG[method][i][:2], SSD)
        for method, scores in _GENEVAL.items()
        for i, model in enumerate(_MODELS)
    ),
    *(
        Published("dpg_bench", model, method, {"overall": row[i][2] / 100}, *row[i][:2], SSD)
        for method, row in _DPG.items()
        for i, model in enumerate(_MODELS)
    ),
    Published("parti", "Lumina-mGPT-7B", "SJD-PV", {}, 4.0, 2.66, "arXiv 2603.06666"),
    Published("coco", "Lumina-mGPT-7B", "SJD-PV", {}, None, 2.71, "arXiv 2603.06666"),
    Published(None, "Janus-Pro-7B", "AR", {"CLIP score": 32.31}, 1, 1, "arXiv 2606.27829"),
    Published(None, "Janus-Pro-7B", "CSD", {"CLIP score": 32.21}, None, 4.33, "arXiv 2606.27829"),
    Published(None, "Janus-Pro-7B", "CSD, nearer to AR", {"CLIP score": 32.28}, None, 3.51, "arXiv 2606.27829"),
    Published(None, "Lumina-mGPT-7B", "CSD", {}, None, 2.60, "arXiv 2606.27829"),
    Published(None, "Lumina-mGPT-7B", "PJD", {}, 6.4, None, "arXiv 2606.05703"),
    Published(None, "several", "SCD (sjd_coupled)", {}, None, 4.2, "arXiv 2510.24211"),
]


def published(suite: str) -> list[Published]:
    """The rows to show beside this suite's."""
    return [row for row in PUBLISHED if row.suite in (suite, None)]
