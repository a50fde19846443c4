"""Forks while threads predict and refit. The child must give an answer of the model, and end."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import afield
from bench.torture.fault import Inject, Kind, Lost, Wrong
from bench.torture.models import answer, data, fitted

PATIENCE = 15.0
OTHER = 3  # status of a child that answers otherwise


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    model, states, over = fitted(), set(), threading.Event()
    errors: list[BaseException] = []

    def refit() -> None:
        """Two states, which come back to the bit: with the amplitude given, the logit scale has a fixed point."""
        afield.fit_posterior(model, [data(0)])
        states.add(answer(model))
        afield.calibrate(model, [data(1)], amplitude=2.0)
        states.add(answer(model))

    for _ in range(5):
        refit()

    def loop(act, pause: float) -> None:
        try:
            with warnings.catch_warnings():
                while not over.is_set():
                    act()
                    time.sleep(pause)
        except BaseException as error:
            errors.append(error)

    work = [(lambda: answer(model), 0.0), (lambda: answer(model), 0.0), (refit, 0.05)]
    threads = [threading.Thread(target=loop, args=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()

    def inject(random: Random) -> None:
        time.sleep(random.uniform(0, 0.004))
        child = os.fork()
        if not child:
            try:
                os._exit(0 if answer(model) in states else OTHER)
            except BaseException:
                os._exit(1)
        status = _wait(child)
        if status is None:
            raise Lost(f"the child hung for {PATIENCE:g} s")
        if status == OTHER:
            raise Wrong("the child gave an answer of no state of the model")
        if status:
            raise Lost(f"the child ended with status {status}")
        if errors:
            raise Lost(f"a thread of the parent ended with {errors[0]!r}")

    try:
        yield inject
    finally:
        over.set()
        for thread in threads:
            thread.join()


KIND = Kind("forks", "a fork while threads predict and refit", opened, share=0.08, limit=25)


def _wait(child: int) -> int | None:
    """Its status; None for a child that had to be killed."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
