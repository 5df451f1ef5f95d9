"""The same deployment played a step at a time, with lists and dictionaries: slow, plain, and written apart.

One decode step or prefill step per event, no jumps, no heaps of step counts; pipelines and data-parallel ranks are left
out. Whatever happens at one moment happens in this order: prompts are complete, tokens are out, calls leave by number.
"""

import heapq
import math
from collections import OrderedDict
from typing import Any

import numpy as np

from breakeven.models.deployment import BALANCED, PREFIX_AWARE, RANDOM
from breakeven.models.simulation.state import CHUNKED, COLOCATED, SPLIT, Plan
from breakeven.models.simulation.traffic import Traffic

PASS, TRANSFERRED, ARRIVAL = 1, 2, 3


def roofline(a: float, b: float) -> float:
    return float((a**4 + b**4) ** 0.25)


class Engine:
    """Its queue, the calls it prefills and decodes, and its prefix cache in order of last use."""

    def __init__(self, speed: Any, capacity: float):
        self.speed, self.capacity = speed, capacity
        self.queue: list[int] = []
        self.begun: dict[int, list[float]] = {}  # call -> [left, position]
        self.running: dict[int, int] = {}  # call -> tokens decoded
        self.cache: OrderedDict[int, float] = OrderedDict()
        self.resumes: set[int] = set()  # sessions in it whose call was preempted
        self.reserved, self.load, self.link_free = 0.0, 0, 0.0
        self.admitted: list[int] = []  # those in service, in the order of their admission
        self.step: tuple[list[int], list[int]] | None = None  # calls that decode, calls whose prompt ends


class Reference:
    """`first_s`, `end_s` and `found` of every call, by playing `traffic` through `plan`."""

    def __init__(self, plan: Plan, traffic: Traffic):
        self.plan, self.calls = plan, traffic.calls.copy()
        prefill = [Engine(plan.prefill, plan.prefill_capacity) for _ in range(plan.prefill_engines)]
        decode = [Engine(plan.decode, plan.decode_capacity) for _ in range(plan.decode_engines)]
        self.engines = prefill + decode
        self.sessions, self.open = traffic.sessions, dict[int, int]()
        self.home = traffic.sessions["home"].tolist()
        self.where: dict[int, int] = {}
        n = len(self.calls)
        self.arrival, self.first, self.end = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
        self.hit, self.at = np.full(n, False), np.full(n, -1)
        self.written, self.preempted = np.zeros(n), np.zeros(n, int)
        self.events: list[tuple[float, int, int]] = []
        for i in traffic.starts:
            start = traffic.sessions["start_s"][i] + plan.request_s
            heapq.heappush(self.events, (start, ARRIVAL, int(traffic.sessions["first_call"][i])))
        while self.events:
            self.now, kind, index = heapq.heappop(self.events)
            if kind == ARRIVAL:
                self.arrive(index)
            elif kind == TRANSFERRED:
                self.transferred(index)
            else:
                self.passed(index)

    def holds(self, e: Engine) -> float:
        return sum(e.cache.values()) + e.reserved + self.plan.shared_prefix

    def shrink(self, e: Engine) -> None:
        while e.cache and self.holds(e) > e.capacity:
            session = next(iter(e.cache))
            over = self.holds(e) - e.capacity
            if session in e.resumes and e.cache[session] > over:
                e.cache[session] -= over
                return
            del e.cache[session]
            e.resumes.discard(session)

    def admits(self, e: Engine, need: float, limited: bool) -> bool:
        if e.reserved == 0.0:
            return True
        full = limited and len(e.begun) + len(e.running) >= self.plan.max_batch
        return not full and e.reserved + need + self.plan.shared_prefix <= e.capacity

    def least(self, engines: range, tie: float) -> int:
        n = len(engines)
        order = [engines[(i + int(tie * n)) % n] for i in range(n)]
        return min(order, key=lambda r: self.engines[r].load)

    def arrive(self, c: int) -> None:
        call = self.calls[c]
        self.arrival[c] = self.now - self.plan.request_s
        session = int(call.session)
        pool, routing = range(self.plan.prefill_engines), self.plan.routing
        holders = [i for i in pool if session in self.engines[i].cache]
        if call.first and self.sessions["parent"][session] >= 0:
            holders = [self.where[session]]
        if routing == RANDOM:
            r = int(call.tie * len(pool))
        elif routing == BALANCED or (routing == PREFIX_AWARE and not holders):
            r = self.least(pool, call.tie)
        elif routing == PREFIX_AWARE:
            r = holders[0]
        else:
            r = self.where.setdefault(session, self.home[session])
        self.at[c] = r
        self.engines[r].load += 1
        self.engines[r].queue.append(c)
        self.work(r)

    def begin(self, r: int, c: int) -> bool:
        e, call = self.engines[r], self.calls[c]
        split = self.plan.mode == SPLIT
        written, again = self.written[c], self.preempted[c] > 0
        need = call.prompt - call.shared + (0.0 if split else call.output)
        if self.plan.preempts:
            need = call.prompt + written - call.shared + 1
        first = self.plan.preempts and self.plan.mode == COLOCATED
        others = len(e.running) + len(e.begun) + 1 if first else 0
        if not self.admits(e, need + others, not split):
            return False
        session = int(call.session)
        hit = session in e.cache and not again
        parent = int(self.sessions["parent"][session])
        above = int(self.calls[parent].session) if parent >= 0 and call.first and not again else -1
        if above in e.cache and above not in e.resumes:
            hit = True
            e.cache.move_to_end(above)
        self.hit[c] = self.hit[c] if again else hit
        kept = e.cache.get(session, 0.0) if session in e.resumes else 0.0
        e.resumes.discard(session)
        for other in self.engines:
            other.cache.pop(session, None)
        self.where[session] = r
        left = float(call.hit_tokens if hit else call.missed_tokens)
        left = float(call.prompt + written - call.shared) - kept if again else left
        e.begun[c] = [left, float(call.prompt) + written - left]
        e.reserved += need
        e.admitted.append(c)
        self.shrink(e)
        return True

    def make_way(self, e: Engine) -> None:
        """A token more for each that decodes; the last admitted go back, what they wrote becomes prompt."""
        if not self.plan.preempts:
            return
        full = e.capacity - self.plan.shared_prefix
        while e.running and e.reserved + len(e.running) > full and len(e.running) + len(e.begun) > 1:
            c = e.admitted.pop()
            call = self.calls[c]
            self.preempted[c] += 1
            e.reserved -= float(call.prompt - call.shared + 1) + self.written[c]
            if c in e.begun:
                held = e.begun.pop(c)[1]  # its place in the queue is right
            else:
                e.reserved -= e.running[c]
                held = call.prompt + self.written[c] + e.running[c]
                self.written[c] += e.running.pop(c) + 1
                e.queue.insert(len(e.begun), c)
            e.cache[int(call.session)] = float(held - call.shared)
            e.resumes.add(int(call.session))
        e.reserved += len(e.running)
        self.shrink(e)

    def work(self, r: int) -> None:
        e = self.engines[r]
        if e.step is not None:
            return
        speed, plan = e.speed, self.plan
        if plan.mode == CHUNKED:
            self.make_way(e)
        prefills = r < plan.prefill_engines
        riding = list(e.running) if plan.mode == CHUNKED or not prefills else []
        room = plan.token_budget - len(riding)
        tokens = pairs = chosen = read = 0.0
        ending: list[int] = []
        while prefills and e.queue and room > 0:
            c = e.queue[0]
            if c not in e.begun and not self.begin(r, c):
                break
            left, position = e.begun[c]
            n = min(left, room)
            pairs += n * (position + 0.5 * n)
            chosen += min(n * (position + 0.5 * n), n * speed.sparse_topk)
            e.begun[c] = [left - n, position + n]
            read, tokens, room = read + position + n, tokens + n, room - n
            if left - n > 0:
                break
            ending.append(e.queue.pop(0))
        if plan.mode == COLOCATED and tokens == 0:
            self.make_way(e)
        decoding = riding if tokens > 0 else list(e.running)
        if not decoding and tokens == 0:
            return
        held = [float(self.calls[c].prompt) + self.written[c] + e.running[c] for c in decoding]
        n = len(decoding) + tokens
        hit = -math.expm1(n * speed.log_expert_miss)
        time_s = speed.step + (speed.activation_token + speed.permute_token) * n
        time_s += speed.collective + speed.collective_token * n + speed.collective_root * n**0.5
        time_s += speed.sequence * (len(decoding) + len(ending))
        time_s += roofline(speed.attention_weight, speed.attention_token * n)
        time_s += roofline(speed.ffn_weight, speed.ffn_token * n)
        time_s += roofline(speed.expert * hit, speed.expert_token * n)
        time_s += speed.context * sum(held) + speed.selected_context * sum(min(x, speed.sparse_topk) for x in held)
        time_s += speed.pair * pairs + speed.selected_pair * chosen + speed.prefill_context * read
        time_s += speed.query * tokens
        e.step = decoding, ending
        heapq.heappush(self.events, (self.now + time_s, PASS, r))

    def passed(self, r: int) -> None:
        e, plan = self.engines[r], self.plan
        assert e.step is not None
        decoding, ending = e.step
        e.step = None
        for c in ending:
            del e.begun[c]
            if plan.mode == SPLIT:
                e.load -= 1
                start = max(self.now, e.link_free)
                e.link_free = start + plan.link_latency_s + plan.link_token_s * self.calls[c].prompt
                heapq.heappush(self.events, (e.link_free, TRANSFERRED, c))
                continue
            self.first[c] = self.now if self.written[c] == 0 else self.first[c]
            e.running[c] = 0
        for c in decoding:
            e.running[c] += 1
        left = self.calls["output"] - self.written - 1
        done = [c for c in ending if c in e.running and left[c] <= 0]
        done += sorted(c for c in decoding if e.running[c] >= left[c])
        for c in done:
            del e.running[c]
            if c in e.admitted:
                e.admitted.remove(c)
            self.leave(r, c)
        if r >= plan.prefill_engines:
            self.admit(r)
        self.work(r)

    def leave(self, r: int, c: int) -> None:
        e, call = self.engines[r], self.calls[c]
        need = float(call.prompt - call.shared + call.output)
        e.load -= 1
        e.reserved -= need
        if r < self.plan.prefill_engines:
            e.cache[int(call.session)] = need
        self.finish(c)

    def finish(self, c: int) -> None:
        self.end[c] = self.now
        call, after = self.calls[c], self.plan.request_s
        parent = int(self.sessions["parent"][call.session])
        if not call.last and call.forks > 0:
            self.open[c] = int(call.forks)
            for child in range(int(call.fork), int(call.fork + call.forks)):
                self.where[child] = self.where[int(call.session)]
                heapq.heappush(self.events, (self.now + after, ARRIVAL, int(self.sessions["first_call"][child])))
        elif not call.last:
            heapq.heappush(self.events, (self.now + call.gap_s + after, ARRIVAL, c + 1))
        elif parent >= 0:
            self.open[parent] -= 1
            if self.open[parent] == 0:
                heapq.heappush(self.events, (self.now + self.calls[parent].gap_s + after, ARRIVAL, parent + 1))

    def transferred(self, c: int) -> None:
        call, plan = self.calls[c], self.plan
        source = self.engines[self.at[c]]
        own = float(call.prompt - call.shared)
        source.reserved -= own
        source.cache[int(call.session)] = own
        if call.output <= 1:
            self.first[c] = self.now
            self.finish(c)
        else:
            engines = range(plan.prefill_engines, plan.prefill_engines + plan.decode_engines)
            r = self.least(engines, (call.tie * 977.0) % 1.0)
            self.engines[r].load += 1
            self.engines[r].queue.append(c)
            self.admit(r)
            self.work(r)
        self.work(int(self.at[c]))

    def admit(self, r: int) -> None:
        e = self.engines[r]
        while e.queue:
            call = self.calls[e.queue[0]]
            need = float(call.prompt - call.shared + call.output)
            if not self.admits(e, need, True):
                return
            e.reserved += need
            c = e.queue.pop(0)
            self.first[c] = self.now
            e.running[c] = 0
