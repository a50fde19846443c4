"""A process that saves, or trains, is killed at a random moment.

Right is a folder that opens as the old or the new model, and a run that goes on to the same metrics.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import afield
from afield.experiment import one_run, run_folder
from bench.torture.bits import CONFIG
from bench.torture.fault import Inject, Kind, Lost, Wrong
from bench.torture.models import answer, fitted, network


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    models = [fitted("sngp"), fitted("sngp", 1), fitted("attach")]
    answers = {answer(model) for model in models}
    place = afield.save(models[0], folder / "model")
    start = time.perf_counter()
    metrics = dict(one_run.run(CONFIG, folder / "runs").metrics)
    seconds = time.perf_counter() - start

    def save_again() -> None:
        for number in range(10**9):
            afield.save(models[number % 3], place)

    def kill_saver(random: Random) -> None:
        _killed(save_again, random.uniform(0, 0.03))
        if answer(afield.load(place, network(5))) not in answers:
            raise Wrong("a saver was killed: the folder opens as a model that nobody saved")
        if random.random() < 0.1:  # the next saver goes on
            afield.save(models[1], place)
            if answer(afield.load(place, network(5))) != answer(models[1]):
                raise Wrong("after a saver was killed, the next save is not what is loaded")

    def kill_run(random: Random) -> None:
        out = folder / "killed"
        shutil.rmtree(out, ignore_errors=True)
        for _ in range(random.choice((1, 1, 2, 3))):
            _killed(lambda: one_run.run(CONFIG, out), random.uniform(0, 1.2 * seconds))
        for _ in range(2):  # goes on to its end; then is read
            if dict(one_run.run(CONFIG, out).metrics) != metrics:
                raise Wrong("a run was killed: it went on to other metrics")
        if not run_folder.is_finished(out / CONFIG.folder):
            raise Lost("a run was killed, went on, and is not finished")

    def inject(random: Random) -> None:
        (kill_run if random.random() < 0.04 else kill_saver)(random)

    yield inject


KIND = Kind("kills", "a process that saves or trains, killed at a random moment", opened, share=0.14, limit=120)


def _killed(act: Callable[[], object], seconds: float) -> None:
    """Do it in a child process, which is killed after some time, or ends before."""
    child = os.fork()
    if not child:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise Lost(f"the process that was to be killed ended by itself, with status {status}")
