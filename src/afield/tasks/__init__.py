"""Tasks: data with in-domain, shifted and OOD parts. `TASKS[name](seed, preset)` makes one."""

from afield.registry import Registry
from afield.settings import Settings
from afield.tasks import cifar, clinc, fashion, genomics, imagenet, shapes, toy, uci
from afield.tasks.task import PRESETS, Recipe, Task, presets

TASKS: Registry[Recipe] = Registry("task")
TASKS["toy-regression"] = Recipe(toy.toy_regression, presets(Settings(likelihood="gaussian", epochs=200)))
TASKS["two-moons"] = toy.planar("two-moons", toy.moons)
TASKS["two-ovals"] = toy.planar("two-ovals", toy.ovals)
TASKS["circles"] = toy.planar("circles", toy.circles)
TASKS["blobs"] = toy.planar("blobs", toy.blobs, classes=5)
TASKS["digits"] = Recipe(toy.digits, presets(toy.SETTINGS))
TASKS["clinc"] = clinc.RECIPE
TASKS["cifar10"] = cifar.cifar("cifar10", 10)
TASKS["cifar100"] = cifar.cifar("cifar100", 100)
TASKS["cifar100-3k"] = cifar.cifar("cifar100-3k", 100)
TASKS["fashion"] = fashion.RECIPE
TASKS["genomics"] = genomics.RECIPE
TASKS["genomics-ren2019"] = genomics.REN2019
TASKS["imagenet"] = imagenet.RECIPE
TASKS["shapes-segmentation"] = shapes.RECIPE
TASKS.update(uci.RECIPES)

__all__ = ["PRESETS", "TASKS", "Recipe", "Settings", "Task"]
