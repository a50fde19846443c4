"""The picture of segmentation shows what is in the run folder, where it says so."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from afield.report import pixels


def panels(part: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(part))
    y = torch.zeros(2, 6, 6)
    y[:, 1:4, 2:5] = 1 if part.startswith("ood") else 3
    found = {name: torch.rand(2, 6, 6, generator=generator) for name in ("doubt", "variance", "score", "p_value")}
    return found | {"x": torch.rand(2, 3, 6, 6, generator=generator), "y": y, "label": y.flip(2)}


@pytest.mark.parametrize("with_variance", [True, False])
def test_columns_are_image_truth_prediction_and_what_is_said_of_them(
    monkeypatch: pytest.MonkeyPatch, with_variance: bool
) -> None:
    parts = {part: panels(part) for part in ("test", "ood/kinds")}
    if not with_variance:
        for part in parts.values():
            del part["variance"]
    drawn: list[Figure] = []
    group: Any = SimpleNamespace(name="sngp")
    monkeypatch.setattr(pixels, "_panels", lambda _: parts)
    monkeypatch.setattr(pixels, "to_png", lambda figure: drawn.append(figure) or b"")
    assert pixels.draw_pixels("shapes", [group]) is not None
    *axes, bar = drawn[0].axes
    titles = [axis.get_title() for axis in axes if axis.get_title()]
    assert titles == [title for name, title in pixels._COLUMNS.items() if with_variance or name != "variance"]
    assert len(axes) == 4 * len(titles)
    first, foreign = axes[: len(titles)], axes[-len(titles) :]
    for line, part, row in ((first, "test", 0), (foreign, "ood/kinds", 1)):
        by_title = {title: np.asarray(axis.images[0].get_array()) for title, axis in zip(titles, line, strict=True)}
        for name in ("y", "label", "score"):
            assert np.array_equal(by_title[pixels._COLUMNS[name]], parts[part][name][row].numpy())
        assert np.allclose(by_title["p-value"], parts[part]["p_value"][row].clamp_min(1e-3).log10().numpy())
    outlined = [title for title, axis in zip(titles, foreign, strict=True) if axis.collections]
    assert outlined == [title for title in titles if title != "truth"]  # which shows the object itself
    assert not any(axis.collections for axis in first)
    assert [label.get_text() for label in bar.get_xticklabels()] == ["0.01", "0.05", "0.2", "1"]
