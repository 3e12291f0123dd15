"""What may happen next: to records in flight, writers, the collector, pointers and replicas.

The writers decide by the real `stitch.core.writer`, the pointers by the real `stitch.core.pointers`, the collector by the real
`stitch.core.retention`. The rest is what the design says that a publisher, a collector and a replica do around them; methods that
begin with `_how` are the ones that the mutation checks replace.
"""

from __future__ import annotations

from collections.abc import Iterator

from stitch.core import lineage as folds
from stitch.core import pointers, retention, writer
from stitch.core.errors import Fenced, VersionConflict
from stitch.core.events import AnchorAdded, Decision, RunClaimed, RunVersion, VersionPublished, VersionRetired
from stitch.core.fleet import Fleet
from stitch.core.ids import LATEST, Epoch, EventId, RunId, VersionNumber, WriterId
from stitch.core.lineage import PolicyLineage, Verdict
from stitch.core.manifest import Kind, ManifestRef
from stitch.core.writer import BaseOffer, Candidate, Fate, Opening, Session
from tests.core.builders import POLICY, manifest_ref
from tests.core.model import laws
from tests.core.model.search import Broken, Step
from tests.core.model.world import BUDGETS, NONE, OVER, Following, State, World, Writer

Steps = Iterator[Step[State]]


class Protocol(World):
    """The system that is explored."""

    def steps(self, state: State) -> Steps:
        yield from self._records(state)
        for index, one in enumerate(state.writers):
            if one.at not in OVER:
                yield from self._writer(state, index, one)
        yield from self._collector(state)
        yield from self._pointers(state)
        for index, kind in enumerate(self.scope.followers):
            yield from self._follower(state, index, kind)

    # --- laws of a state ---

    def check(self, state: State) -> None:
        needs = self.needs(state.lineage)
        if needs.wrong:
            raise Broken(needs.wrong)
        if self.policy(state.lineage).epoch > sum(self.scope.lives):
            raise Broken("I5 a policy was claimed more often than it was opened: openers go round for ever")
        if not needs.required <= state.store:
            raise Broken(f"I1 an accepted, unretired version lost {sorted(needs.required - state.store)}")

    def check_quiescent(self, state: State) -> None:
        for index, one in enumerate(state.writers):
            if one.at not in OVER and not (one.at == "idle" and self._must_wait(state, index)):
                raise Broken(f"I5 writer w{index}.{one.life} waits for ever: {one.at}")
        if all(one.at == "fenced" for one in state.writers):
            raise Broken("I6 every writer was fenced, so nobody won")
        self._check_followers(state)

    def _check_followers(self, state: State) -> None:
        if not self.scope.followers:
            return
        policy = self.policy(state.lineage)
        derived = self.derived(state.lineage)
        if derived == NONE:
            return
        channel = policy.channels[LATEST]
        for kind, following in zip(self.scope.followers, state.followers, strict=True):
            if following.target != channel.target:
                raise Broken(f"I5 a replica that follows {kind} stays at {following.target}, the channel is at {channel.target}")
        last = self.pointers[state.topic[-1]] if state.topic else None
        wanted = self.pointers[derived]
        if last is None or last.order != wanted.order:
            raise Broken("I5 the last pointer stays behind the log: who joins after a compaction is stranded")
        missing = laws.load_keys(policy, last.target, last.anchor, last.anchor_manifest.key) - state.store
        if missing:
            raise Broken(f"I5 who knows the pointer alone cannot load {last.target}: {sorted(missing)} is gone for good")

    # --- records in flight ---

    def _records(self, state: State) -> Steps:
        for number in sorted(set(state.flying)):
            event = self.events[number]
            judged = self.judge(state.lineage, number)
            if judged.verdict is Verdict.ACCEPTED and event.event_id in state.told_no:
                raise Broken(f"I6 {event.event_id} was reported as refused and is accepted now")
            at = state.flying.index(number)
            rest = state.flying[:at] + state.flying[at + 1 :]
            what = f"{describe(event)} lands: {judged.verdict}"
            yield Step(what, self.canonical(state._replace(flying=rest), judged.lineage), False)
            if self._left(state, "losses"):
                yield Step(f"{describe(event)} is lost", self._spend(state._replace(flying=rest), "losses"), True)
            if self._left(state, "doubles"):
                again = self._spend_raw(state, "doubles")
                yield Step(f"{what}; it will land once more", self.canonical(again, judged.lineage), True)

    # --- writers ---

    def _writer(self, state: State, index: int, one: Writer) -> Steps:
        match one.at:
            case "idle":
                if not self._must_wait(state, index):
                    yield from self._open(state, index, one)
            case "claiming":
                yield from self._await_claim(state, index, one)
            case "ready":
                yield from self._upload(state, index, one)
            case "uploaded":
                yield from self._append(state, index, one)
            case "publishing":
                yield from self._await_publication(state, index, one)
        if one.at != "idle" and self._left(state, "crashes"):
            life = one.life + 1
            after = Writer(at="idle" if life < self.scope.lives[index] else "dead", life=life, todo=self.scope.todo[index])
            yield Step(f"{_name(index, one)} crashes", self._spend(_with(state, index, after), "crashes"), True)

    def _must_wait(self, state: State, index: int) -> bool:
        return self.scope.first and index == 1 and state.writers[0].at in ("idle", "claiming")

    def _open(self, state: State, index: int, one: Writer) -> Steps:
        for opening in self._openings(self.policy(state.lineage), index, one):
            number = self.openings.number(opening)
            after = one._replace(opening=number)
            yield self._claim(state, index, after, f"{_name(index, one)} opens with boot {opening.boot}")

    def _openings(self, policy: PolicyLineage, index: int, one: Writer) -> Iterator[Opening]:
        run, who = RunId(self.scope.runs[index]), WriterId(_name(index, one))
        boot, alias, base = None, None, None
        fresh = policy.greatest(run) is None
        if fresh and self.scope.start == "alias" and policy.tip is not None and policy.tip.run != run:
            alias = policy.tip
        elif self.scope.start != "nothing" and (policy.tip is None or fresh):
            base = BaseOffer(number=VersionNumber(0), manifest=manifest_ref(f"{run}/0.base"))
        yield Opening(policy=POLICY, run=run, writer=who, boot=boot, base=base, alias=alias, take_over=True)
        if "back" in self.scope.boots and policy.tip is not None and policy.tip.run == run:
            before = policy.versions[policy.tip].parent
            if before is not None and before.run == run:
                yield Opening(policy=POLICY, run=run, writer=who, boot=before.number, take_over=True)

    def _claim(self, state: State, index: int, one: Writer, label: str) -> Step[State]:
        """The claim of a new opening, or once more after one that was beaten."""
        opening = self.openings[one.opening]
        policy = self.policy(state.lineage)
        try:
            claim = writer.plan_claim(policy, opening, self.fresh(state, opening.writer))
        except Fenced:
            return self._fenced(state, index, one, f"{label}: Fenced")
        except VersionConflict as error:
            return Step(f"{label}: {error}", self.canonical(_with(state, index, one._replace(at="conflict"))), False)
        number = self.events.number(claim)
        state = _with(state, index, one._replace(at="claiming", event=number))
        if claim.base is not None:
            state = state._replace(store=state.store | {claim.base.key})
        return Step(f"{label}: appends {describe(claim)}", self.canonical(_send(state, number)), False)

    def _await_claim(self, state: State, index: int, one: Writer) -> Steps:
        claim = self.events[one.event]
        assert isinstance(claim, RunClaimed)
        policy = self.policy(state.lineage)
        who = _name(index, one)
        match writer.fate(policy, claim):
            case Fate.ACCEPTED:
                self._check_told(policy, claim, accepted=True)
                yield self._claimed(state, index, one, claim)
            case Fate.REFUSED:
                self._check_told(policy, claim, accepted=False)
                told = state._replace(told_no=state.told_no | {claim.event_id})
                yield self._claim(told, index, one._replace(at="idle", event=NONE), f"{who} reads that its claim was beaten")
            case Fate.OPEN:
                yield from self._again(state, index, one)

    def _claimed(self, state: State, index: int, one: Writer, claim: RunClaimed) -> Step[State]:
        session = writer.session_of(claim, self.policy(state.lineage))
        who = _name(index, one)
        if session is None:
            return self._how_superseded(state, index, one)
        after = one._replace(at="ready", event=NONE, epoch=session.epoch)
        return Step(f"{who} reads that its claim was accepted", self.canonical(self._point(_with(state, index, after))), False)

    def _how_superseded(self, state: State, index: int, one: Writer) -> Step[State]:
        """The claim was accepted and another after it: the last opener wins, so this one does not claim again."""
        return self._fenced(state, index, one, f"{_name(index, one)} reads that another claimed after it: Fenced")

    def _upload(self, state: State, index: int, one: Writer) -> Steps:
        policy = self.policy(state.lineage)
        session = self._session(index, one)
        who = _name(index, one)
        try:
            writer.check_owned(policy, session)
        except Fenced:
            yield self._fenced(state, index, one, f"{who} wants to publish: Fenced")
            return
        tip = policy.tip
        greatest = policy.greatest(session.run)
        number = VersionNumber(0 if greatest is None else greatest + 1)
        for base in self._bases(policy, session.run, one):
            candidate = Candidate(
                number=number,
                kind=Kind.FULL if base is None else Kind.DELTA,
                base=base,
                parent=tip.number if tip is not None else None,
                manifest=manifest_ref(f"{session.run}/{number}.e{one.epoch}.{base or 'full'}"),
                size=1,
            )
            after = one._replace(at="uploaded", candidate=self.candidates.number(candidate))
            uploaded = _with(state, index, after)._replace(store=state.store | {candidate.manifest.key})
            yield Step(f"{who} uploads {candidate.manifest.key}", self.canonical(uploaded), False)

    def _bases(self, policy: PolicyLineage, run: RunId, one: Writer) -> Iterator[RunVersion | None]:
        kept = sorted((v.ref for v in policy.versions.values() if v.retired is None and v.ref.run == run), key=lambda r: r.number)
        if one.full or not kept or policy.tip is None:
            yield None
            return
        chosen = {"full": None, "tip": policy.tip, "oldest": kept[0]}
        yield from dict.fromkeys(chosen[name] for name in self.scope.bases)

    def _append(self, state: State, index: int, one: Writer) -> Steps:
        policy = self.policy(state.lineage)
        session, candidate = self._session(index, one), self.candidates[one.candidate]
        who = _name(index, one)
        try:
            publication = writer.plan_publication(policy, session, candidate, self.fresh(state, session.writer))
        except Fenced:
            yield self._fenced(state, index, one, f"{who} wants to append: Fenced")
            return
        except VersionConflict as error:
            raise Broken(f"I6 the owner is told of a conflict about a number that it chose itself: {error}") from error
        number = self.events.number(publication)
        after = _with(state, index, one._replace(at="publishing", event=number, candidate=NONE))
        yield Step(f"{who} appends {describe(publication)}", self.canonical(_send(after, number)), False)

    def _await_publication(self, state: State, index: int, one: Writer) -> Steps:
        publication = self.events[one.event]
        assert isinstance(publication, VersionPublished)
        policy = self.policy(state.lineage)
        who = _name(index, one)
        match writer.fate(policy, publication):
            case Fate.ACCEPTED:
                self._check_told(policy, publication, accepted=True)
                todo = one.todo - 1
                self._check_count(state, index, one._replace(todo=todo), who)
                after = one._replace(at="ready" if todo else "done", event=NONE, todo=todo, full=False)
                pointed = self.canonical(self._point(_with(state, index, after)))
                yield Step(f"{who} reads that {publication.number} was accepted", pointed, False)
            case Fate.REFUSED:
                self._check_told(policy, publication, accepted=False)
                self._check_count(state, index, one, who)
                told = state._replace(told_no=state.told_no | {publication.event_id})
                yield self._refused(told, index, one)
            case Fate.OPEN:
                yield from self._again(state, index, one)
                if self._left(state, "giveups"):
                    yield self._how_given_up(state, index, one)

    def _refused(self, state: State, index: int, one: Writer) -> Step[State]:
        who = _name(index, one)
        try:
            writer.check_owned(self.policy(state.lineage), self._session(index, one))
        except Fenced:
            return self._fenced(state, index, one, f"{who} reads that its publication was refused: Fenced")
        if one.full:
            raise Broken("I6 a full publication was refused although its writer owns the head")
        after = one._replace(at="ready", event=NONE, full=True)
        return Step(
            f"{who} reads that its publication was refused, will send a full one", self.canonical(_with(state, index, after)), False
        )

    def _how_given_up(self, state: State, index: int, one: Writer) -> Step[State]:
        """OutcomeUnknown was raised. The next publish settles the old event first, so the writer stays where it is."""
        return Step(f"{_name(index, one)} gives up: OutcomeUnknown", self._spend(state, "giveups"), True)

    def _again(self, state: State, index: int, one: Writer) -> Steps:
        lost = one.event not in state.flying
        if not lost and not self._left(state, "timeouts"):
            return
        number, one = self._how_again(state, index, one)
        sent = _send(_with(state, index, one), number)
        label = f"{_name(index, one)} {'hears nothing' if lost else 'times out'}: appends {describe(self.events[number])} again"
        yield Step(label, self.canonical(sent) if lost else self._spend(sent, "timeouts"), not lost)

    def _how_again(self, state: State, index: int, one: Writer) -> tuple[int, Writer]:
        """Rule 4: the same event, with the same id and the same expected head."""
        return one.event, one

    def _session(self, index: int, one: Writer) -> Session:
        run = RunId(self.scope.runs[index])
        return Session(policy=POLICY, run=run, writer=WriterId(_name(index, one)), epoch=Epoch(one.epoch))

    def _fenced(self, state: State, index: int, one: Writer, label: str) -> Step[State]:
        owner = self.policy(state.lineage).owner
        if owner is not None and owner.writer == _name(index, one):
            raise Broken(f"I6 the owner is told that it is fenced: {label}")
        self._check_count(state, index, one, label)
        return Step(label, self.canonical(_with(state, index, one._replace(at="fenced"))), False)

    def _check_told(self, policy: PolicyLineage, event: Decision, *, accepted: bool) -> None:
        really = policy.verdicts.get(event.event_id) is Verdict.ACCEPTED
        if really != accepted:
            raise Broken(f"I6 {describe(event)} is reported as {'accepted' if accepted else 'refused'}, and is not")

    def _check_count(self, state: State, index: int, one: Writer, who: str) -> None:
        """A session, which is one epoch, has as many versions as its writer was told of: each publish is accepted once."""
        if not one.epoch:
            return
        made = sum(f".e{one.epoch}." in v.manifest.key for v in self.policy(state.lineage).versions.values() if v.alias_of is None)
        told = self.scope.todo[index] - one.todo
        if made != told:
            raise Broken(f"I6 {made} versions of epoch {one.epoch} were accepted, its writer was told of {told}: {who}")

    # --- the collector and the compactor ---

    def _collector(self, state: State) -> Steps:
        policy = self.policy(state.lineage)
        if self._left(state, "retirements"):
            for version in policy.versions.values():
                if version.retired is None and not folds.needed(policy, version.ref):
                    event = VersionRetired(
                        policy=POLICY, version=version.ref, event_id=EventId(f"retire {version.ref}"), writer=WriterId("collector")
                    )
                    yield self._operate(state, "retirements", event)
        if self._left(state, "anchors"):
            for version in policy.versions.values():
                if version.retired is None and version.anchor is None and version.link is not None:
                    key = f"{version.ref}.e{policy.epoch}.anchor"
                    event = AnchorAdded(
                        policy=POLICY,
                        version=version.ref,
                        event_id=EventId(f"anchor {version.ref}.e{policy.epoch}"),
                        writer=WriterId("compactor"),
                        epoch=policy.epoch,
                        manifest=_same_weights(key, version),
                        size=1,
                    )
                    yield self._operate(state._replace(store=state.store | {key}), "anchors", event)
        if self._left(state, "collections") and not state.listed:
            listed = self._how_collected(state)
            if listed:
                yield Step(f"the collector lists {sorted(listed)}", self._spend(state._replace(listed=listed), "collections"), True)
        if state.listed:
            after = state._replace(store=state.store - state.listed, listed=frozenset())
            yield Step(f"the collector deletes {sorted(state.listed)}", self.canonical(after), False)

    def _operate(self, state: State, budget: str, event: Decision) -> Step[State]:
        number = self.events.number(event)
        return Step(f"{event.writer} appends {describe(event)}", self._spend(_send(state, number), budget), True)

    def _how_collected(self, state: State) -> frozenset[str]:
        """Rules 2 and 7 by the real judgement, where every grace is over."""
        policy = self.policy(state.lineage)
        needs = self.needs(state.lineage)
        due = retention.due(policy, Fleet(), now_ms=0, grace_ms=0)
        kept = needs.named - needs.free
        judged = {key: retention.judge(policy, _attempt_of(key), named=key in kept, due=due).fate for key in state.store}
        return frozenset(key for key, fate in judged.items() if fate is retention.Fate.FREE)

    # --- pointers and replicas ---

    def _point(self, state: State) -> State:
        """Rule 5: whoever read an acceptance back sends the pointer."""
        derived = self.derived(state.lineage)
        if not self.scope.followers or derived == NONE:
            return state
        return state._replace(sent=tuple(sorted({*state.sent, derived})))

    def _pointers(self, state: State) -> Steps:
        for number in sorted(set(state.sent)):
            at = state.sent.index(number)
            rest = state._replace(sent=state.sent[:at] + state.sent[at + 1 :])
            what = f"pointer {self.pointers[number].order} to {self.pointers[number].target}"
            yield Step(f"{what} lands", self.canonical(rest._replace(topic=(*state.topic, number))), False)
            if self._left(state, "pointer_losses"):
                yield Step(f"{what} is lost", self._spend(rest, "pointer_losses"), True)
        if len(state.topic) > 1 and self._left(state, "compactions"):
            yield Step(
                "compaction keeps the last pointer", self._spend(state._replace(topic=state.topic[-1:]), "compactions"), True
            )
        derived = self.derived(state.lineage)
        if self.scope.followers and derived != NONE and not state.sent:
            last = self._how_last(state)
            if pointers.is_behind(None if last == NONE else self.pointers[last], self.pointers[derived]):
                yield Step("somebody sees the pointers behind the log, repairs them", state._replace(sent=(derived,)), False)

    def _how_last(self, state: State) -> int:
        """What a repairer holds against the log: the last record of the stream."""
        return state.topic[-1] if state.topic else NONE

    def _follower(self, state: State, index: int, kind: str) -> Steps:
        following = state.followers[index]
        for source, offer in self._offers(state, kind):
            if self._how_further(offer, following):
                if offer.sequence < following.sequence:
                    raise Broken(f"I2 a replica goes from sequence {following.sequence} back to {offer.sequence}")
                if offer.sequence == following.sequence and offer.target != following.target:
                    raise Broken(f"I2 sequence {offer.sequence} names {following.target} and {offer.target}")
                if offer.target not in self.policy(state.lineage).versions:
                    raise Broken(f"I1 a replica follows {offer.target}, which was never accepted")
                label = f"a replica that follows {kind} takes {offer.target} (sequence {offer.sequence}) from the {source}"
                yield Step(label, _following(state, index, offer), False)
        if following.target is not None and self._left(state, "joins"):
            yield Step(
                f"a replica that follows {kind} is replaced", self._spend(_following(state, index, Following()), "joins"), True
            )

    def _how_further(self, offer: Following, following: Following) -> bool:
        return (offer.sequence, offer.offset) > (following.sequence, following.offset)

    def _offers(self, state: State, kind: str) -> Iterator[tuple[str, Following]]:
        channel = self.policy(state.lineage).channels.get(LATEST)
        if kind in ("log", "either") and channel is not None and channel.target is not None:
            yield "log", Following(channel.sequence, channel.position.offset, channel.target)
        newest = pointers.greatest(self.pointers[n] for n in state.topic)
        if kind in ("pointers", "either") and newest is not None:
            yield "pointers", Following(newest.sequence, newest.offset, newest.target)

    # --- budgets ---

    def _left(self, state: State, name: str) -> bool:
        return state.budgets[BUDGETS.index(name)] > 0

    def _spend(self, state: State, name: str) -> State:
        return self.canonical(self._spend_raw(state, name))

    def _spend_raw(self, state: State, name: str) -> State:
        at = BUDGETS.index(name)
        return state._replace(budgets=(*state.budgets[:at], state.budgets[at] - 1, *state.budgets[at + 1 :]))


def describe(event: Decision) -> str:
    """The event, as a trace names it."""
    match event:
        case RunClaimed():
            start = event.alias or (event.base and event.base.key) or event.boot
            return f"claim {event.event_id} of {event.run} (boot {start}, head {event.expected_head})"
        case VersionPublished():
            how = f"delta on {event.base}" if event.base else "full"
            about = f"epoch {event.epoch}, head {event.expected_head}, {how}"
            return f"publication {event.event_id} of {event.run}/{event.number} ({about})"
        case _:
            return f"'{event.event_id}'"


def _same_weights(key: str, version: folds.Version) -> ManifestRef:
    made = manifest_ref(key)
    return ManifestRef(key=key, digest=made.digest, weights_digest=version.manifest.weights_digest)


def _name(index: int, one: Writer) -> WriterId:
    return WriterId(f"w{index}.{one.life}")


def _with(state: State, index: int, one: Writer) -> State:
    return state._replace(writers=(*state.writers[:index], one, *state.writers[index + 1 :]))


def _following(state: State, index: int, following: Following) -> State:
    return state._replace(followers=(*state.followers[:index], following, *state.followers[index + 1 :]))


def _send(state: State, event: int) -> State:
    return state._replace(flying=tuple(sorted((*state.flying, event))))


def _attempt_of(key: str) -> retention.Attempt:
    """Where the bytes of a manifest's key lie: `a/1.e2.full`, `a/weight_v000001.e2.anchor` or `a/0.base`."""
    place, how, *_ = key.split(".")
    run, _, number = place.rpartition("/")
    return retention.Attempt(
        run=RunId(run),
        number=VersionNumber(int(number.removeprefix("weight_v"))),
        epoch=None if how == "base" else Epoch(int(how.removeprefix("e"))),
        base="0" * 16 if how == "base" else None,
    )
