"""Threads that predict, save and load while others fit, update, downdate and calibrate.

Every answer must be that of one state of the model. Those who change it remember the answers of the states they make.
Where updates run into each other, their sum must be that of all of them, in any order.
"""

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

import afield
from afield.model.posterior import downdate, update
from bench.torture.fault import Inject, Kind, Lost, Wrong
from bench.torture.models import answer, data, fitted, network

ACTS = ("fit", "fit", "calibrate", "update and downdate", "update")


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    bases = [fitted("sngp"), fitted("attach")]

    def inject(random: Random) -> None:
        model = copy.deepcopy(random.choice(bases))
        before = sys.getswitchinterval()
        sys.setswitchinterval(10 ** random.uniform(-6, -2.5))
        try:
            if random.random() < 0.75:
                _one_state_at_a_time(model, random, folder / "model")
            else:
                _sums(model, random)
        finally:
            sys.setswitchinterval(before)

    yield inject


KIND = Kind("races", "threads that predict, save and load while others change the model", opened, share=0.12, limit=60)


def _one_state_at_a_time(model: afield.SNGP, random: Random, folder: Path) -> None:
    lock, states, seen, over = threading.Lock(), {answer(model)}, [], threading.Event()
    plans = [[random.choice(ACTS) for _ in range(5)] for _ in range(2)]
    numbers = [random.randrange(100, 10**6) for _ in plans]

    def remember() -> None:
        states.add(answer(model))

    def change(plan: list[str], number: int) -> None:
        for step, act in enumerate(plan):
            with lock:
                loader = [data(number + step)]
                if act == "fit":
                    afield.fit_posterior(model, loader)
                elif act == "calibrate":
                    afield.calibrate(model, loader)
                else:
                    update(model, loader)
                    if "downdate" in act:
                        remember()
                        downdate(model, loader)
                remember()

    def predict() -> None:
        while not over.is_set():
            seen.append(("predict", answer(model)))

    def save() -> None:
        while not over.is_set():
            afield.save(model, folder)
            seen.append(("load", answer(afield.load(folder, network(5)))))

    writers = [lambda p=p, n=n: change(p, n) for p, n in zip(plans, numbers, strict=True)]
    _run(writers, [predict, predict, predict, save], over)
    if wrong := [what for what, each in seen if each not in states]:
        raise Wrong(
            f"{len(wrong)} of {len(seen)} answers are of no state of the model ({', '.join(sorted(set(wrong)))})"
        )
    fresh = copy.deepcopy(model)
    for one in (model, fresh):
        afield.fit_posterior(one, [data(3)])
    _compare(model, fresh, "after the threads have ended, a fit differs from one in a copy")


def _sums(model: afield.SNGP, random: Random) -> None:
    over = threading.Event()
    numbers = [random.randrange(100, 10**6) for _ in range(3)]
    expected = copy.deepcopy(model)
    for number in numbers:
        for step in range(4):
            update(expected, [data(number + step)])

    def add(number: int) -> None:
        for step in range(4):
            update(model, [data(number + step)])

    def predict() -> None:
        while not over.is_set():
            if not torch.isfinite(model.predict(data(9)[0]).variance).all():
                raise Wrong("a variance that is not finite")

    _run([lambda n=n: add(n) for n in numbers], [predict, predict], over)
    _compare(model, expected, "updates of several threads are not the sum of all")


def _compare(one: afield.SNGP, two: afield.SNGP, text: str) -> None:
    a, b = one.head.precision.data, two.head.precision.data
    if one.head.num_observed != two.head.num_observed or not torch.allclose(a, b, rtol=1e-12, atol=1e-12):
        raise Wrong(text)
    va, vb = (m.predict(data(9)[0]).variance for m in (one, two))
    if not torch.allclose(va, vb, rtol=1e-5):
        raise Wrong(f"{text}, in the variance")


def _run(writers: list[Callable[[], None]], readers: list[Callable[[], None]], over: threading.Event) -> None:
    errors: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(act,), daemon=True) for act in (*readers, *writers)]
    for thread in threads:
        thread.start()
    for thread in threads[len(readers) :]:
        thread.join()
    over.set()
    for thread in threads[: len(readers)]:
        thread.join()
    if errors:
        if isinstance(errors[0], Wrong):
            raise errors[0]
        raise Lost(f"{len(errors)} threads ended with an error, the first with {errors[0]!r}") from errors[0]
