"""`afield settings`: every setting with its meaning and its value for every task, as docs/settings.md has them."""

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields

from afield.settings import Settings
from afield.tasks import PRESETS, TASKS


@dataclass(frozen=True)
class ShowSettings:
    """Print all settings, and what each task sets differently, in Markdown."""

    def run(self) -> None:
        print(page(), end="")


def page() -> str:
    """The whole of docs/settings.md."""
    default = Settings()
    lines = [
        "# Settings",
        "",
        "Written by `afield settings > docs/settings.md`. Each is a flag of `afield train` (`--batch-size 64`), a key",
        "of `config.toml` and a field of `afield.settings.Settings`.",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
    ]
    meaning = meanings()
    lines += [f"| `{f.name}` | {_format(getattr(default, f.name))} | {meaning[f.name]} |" for f in fields(Settings)]
    lines += ["", "What tasks set differently:", "", "| task | preset | settings |", "| --- | --- | --- |"]
    for name, recipe in TASKS.items():
        texts = [_changes(recipe.settings_for(preset)) for preset in PRESETS]
        for text in dict.fromkeys(texts):
            same = [preset for preset, own in zip(PRESETS, texts, strict=True) if own == text]
            lines.append(f"| {name} | {', '.join(same)} | {text} |")
        for pattern, changes in recipe.adapted.items():
            text = ", ".join(f"{setting} {_format(value)}" for setting, value in changes.items())
            lines.append(f"| {name} | all, methods `{pattern}` | {text} |")
    return "\n".join(lines) + "\n"


def _changes(settings: Settings) -> str:
    default = Settings()
    names = [f.name for f in fields(Settings) if getattr(settings, f.name) != getattr(default, f.name)]
    return ", ".join(f"{name} {_format(getattr(settings, name))}" for name in names) or "as above"


def meanings() -> dict[str, str]:
    """The text below each field of `Settings` in its source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(Settings))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            texts[node.target.id] = str(after.value.value)
    return texts


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "()"
    return f"{value:g}" if isinstance(value, float) else str(value)
