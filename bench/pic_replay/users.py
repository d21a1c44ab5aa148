"""The locust side: a user that takes sessions and runs their calls in order."""

from __future__ import annotations

import time
from typing import ClassVar

import gevent
from gevent.event import Event
from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser

from pic_replay.state import Replay


class SessionUser(User):
    """A simulated user: takes the next unstarted session, makes its calls one after the other, and takes another."""

    abstract = True
    wait_time = constant(0)
    replay: ClassVar[Replay]

    @task
    def run_session(self) -> None:
        """Run one session; the user ends when none is left."""
        session = self.replay.take_session()
        if session is None:
            raise StopUser
        for call in session.calls():
            if self.replay.stopped is not None:
                break
            self.replay.perform(call, scheduled_at=time.monotonic())
        self.replay.end_session()


def run_users(replay: Replay, num_users: int) -> None:
    """Run users until every session has ended or the replay is stopped; calls that still run then are cut off.

    An exception thrown into the caller (Ctrl-C) cuts the users off too, and passes through.
    """
    ended = Event()
    replay.when_ended(ended.set)
    user_class = type("TraceUser", (SessionUser,), {"replay": replay, "abstract": False})
    environment = Environment(user_classes=[user_class], catch_exceptions=False)
    environment.events.user_error.add_listener(lambda exception, **_: replay.stop(f"a user crashed: {exception!r}"))
    runner = environment.create_local_runner()
    try:
        runner.start(num_users, spawn_rate=num_users)
        ended.wait()
    finally:
        runner.quit()
        gevent.idle()
