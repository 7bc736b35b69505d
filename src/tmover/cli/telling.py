"""Lines of a journal in a few words, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tmover.controller.lines import Kept

_LONGEST = 160
"""Characters of one value; a plan of a thousand ranks says nothing to people."""
_SENTENCES = {
    "Joined": "{agent} is up on {node}",
    "Launched": "launch {launch} of {agent} is up",
    "Looping": "{worker} trains after step {step}",
    "Warm": "{worker} has rehearsed and waits",
    "Prepared": "{worker} is prepared for epoch {epoch}",
    "PrepareFailed": "{worker} cannot prepare epoch {epoch}: {reason}",
    "Entered": "{worker} stands before epoch {epoch}, after step {step}",
    "Verified": "{worker} holds the state of step {step} for epoch {epoch}",
    "Passed": "{worker} trains in epoch {epoch}, after step {step}",
    "Stepped": "the first step of epoch {epoch} is applied: {step}",
    "Stored": "{worker} has stored its part of step {step} {reason}",
    "Broken": "{worker} lost its links to {peers} in epoch {epoch}: {reason}",
    "Reported": "{worker} reports on epoch {of}: epoch {epoch}, step {step}",
    "Finished": "{worker} has finished after step {step}",
    "Exited": "the workers of {agent} ended with {code}: {reason}",
    "Left": "{agent} has ended: {reason}",
    "Answered": "{agent} lives",
    "Submitted": "{owner} submits a job of {nnodes} nodes x {nproc} ranks, {standby} standbys",
    "MoveRequested": "{node} is to be left: {reason} {more}",
    "NodeReady": "{node} may be used again",
    "CancelRequested": "the job is to end with {code}: {reason}",
    "NodeLost": "{node} is down: {reason}",
    "Lent": "{agent} is lent to job {to}",
    "StandbysGone": "the standbys ordered in epoch {epoch} are gone",
    "LeaseExpired": "{agent} was not heard of for its lease",
    "Stuck": "all wait for {agent} in epoch {epoch}: {reason}",
    "Straggling": "{agent} is slow in epoch {epoch}: {reason} {hindrance}",
    "DeadlinePassed": "the deadline to {wait} of epoch {epoch} has passed",
}


def told(entry: Kept) -> tuple[str, str]:
    """Return what kind of entry it is, and a sentence on it."""
    from tmover.controller.lines import Settled, Snapshot

    kind = type(entry).__name__
    if isinstance(entry, Snapshot):
        stage = entry.state.get("phase")
        stage = stage.get("is") if isinstance(stage, dict) else stage
        text = f"all before it: {stage}, epoch {entry.state.get('epoch')}"
        return kind, text
    if isinstance(entry, Settled):
        return kind, f"the scheduler has done it: {owed(entry.effect)} {entry.note}".strip()
    fields = {name: _short(value) for name, value in msgspec.to_builtins(entry).items()}
    sentence = _SENTENCES.get(kind)
    if sentence is None:
        return kind, " ".join(f"{n}={v}" for n, v in fields.items() if n not in _OWN)
    return kind, sentence.format_map(fields).strip(" ")


_OWN = ("type", "job", "at")


def owed(effect: msgspec.Struct) -> str:
    """Return what the scheduler is asked, in a few words."""
    fields = msgspec.to_builtins(effect)
    said = " ".join(f"{n}={_short(v)}" for n, v in fields.items() if n not in _OWN)
    return f"{type(effect).__name__} {said}"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
