"""How many steps optimizers have taken in this process: fused ones change a weight without counting up its version."""

import functools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

count = 0


@functools.cache
def follow() -> None:
    """Count the steps of all optimizers from now on."""

    def add(*_: Any) -> None:
        global count
        count += 1

    register_optimizer_step_post_hook(add)
