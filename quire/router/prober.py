"""Looking after back ends beside the requests: are they alive, what do they serve, where are they.

Owns one task for all. A probe that is answered, with whatever but a 5xx, lets requests try a back
end again; `MAX_SILENT` probes in a row without an answer are taken for its death, which ends the
wait of everything that is in flight there. A back end that answers 5xx is alive and not ready: its
requests in flight are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from quire.common.failures import log_failure
from quire.common.http_client import Address, HttpClient, HttpError, HttpRequest
from quire.common.lookup import addresses_of
from quire.common.watch_clock import counted_timeout
from quire.config.route import RouteConfig
from quire.errors import ConfigError
from quire.router.fleet import Fleet, Replica

logger = logging.getLogger(__name__)

MAX_SILENT = 3
_DNS = "dns+"
_MAX_MODELS = 4096
_ROUNDS_OF_MODELS = 12
"""After so many probes a back end is asked once more what it serves."""


class _Model(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    """What a back end says that it serves."""

    data: list[_Model]


class DnsSource:
    """A name that stands for several back ends."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError."""
        self.url = url
        self.address = Address.parse(url.removeprefix(_DNS))
        self.names: frozenset[str] = frozenset()

    async def resolve(self) -> list[str]:
        """Return URLs, one for each address. Raises OSError."""
        address = self.address
        scheme = "https" if address.is_secure else "http"
        hosts = sorted(await addresses_of(address.host, address.port))
        shown = [f"[{host}]" if ":" in host else host for host in hosts]
        return [f"{scheme}://{host}:{address.port}{address.path}" for host in shown]


class Prober:
    """The task, and the names that it resolves."""

    def __init__(self, config: RouteConfig, fleet: Fleet, headers: Mapping[str, str]) -> None:
        self._config = config
        self._fleet = fleet
        self._headers = dict(headers)
        self._sources: list[DnsSource] = []
        self._num_silent: dict[Replica, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._num_rounds = 0
        self._num_lists = 0
        """Questions for lists of models."""

    def add(self, url: str) -> None:
        """Take a back end, or a name that stands for several. Raises ConfigError."""
        if url.startswith(_DNS):
            if all(source.url != url for source in self._sources):
                self._sources.append(DnsSource(url))
        else:
            self._fleet.add(url)

    def remove(self, url: str) -> bool:
        """Let go of either; False where there is no such thing. Raises ConfigError."""
        if url.startswith(_DNS):
            found = [source for source in self._sources if source.url == url]
            for source in found:
                self._sources.remove(source)
                self._drop(source.names)
            return bool(found)
        replica = self._fleet.find(url)
        if replica is not None:
            self._fleet.remove(replica)
        return replica is not None

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._every(self._config.health_interval_s, self.probe_all)),
            asyncio.create_task(self._every(self._config.dns_interval_s, self.resolve_all)),
        ]

    async def close(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _every(self, interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await act()
            except Exception as error:
                log_failure(logger, "looking after the back ends failed", error)
            await asyncio.sleep(interval_s)

    async def resolve_all(self) -> None:
        """Look the names up; addresses that a name no longer has are drained. One that cannot be
        looked up keeps those that it had."""
        for source in tuple(self._sources):
            try:
                async with counted_timeout(self._config.connect_timeout_s):
                    urls = await source.resolve()
            except (OSError, TimeoutError) as error:
                reason = str(error) or "the resolver does not answer in time"
                logger.warning("%s cannot be resolved: %s", source.url, reason)
                continue
            if source not in self._sources:  # removed meanwhile
                continue
            names = set()
            for url in urls:
                known = self._fleet.find(url)
                if known is not None and known.is_draining and not known.is_leaving:
                    names.add(known.name)  # an operator drains it
                    continue
                try:
                    replica = self._fleet.add(
                        url, host_name=source.address.netloc, source=source.url
                    )
                except ConfigError as error:
                    logger.warning("%s: %s", source.url, error)
                    break
                names.add(replica.name)
            self._drop(source.names - names)
            source.names = frozenset(names)

    def _drop(self, names: frozenset[str]) -> None:
        for replica in self._fleet.replicas:
            if replica.name in names and replica.source is not None:
                self._fleet.remove(replica)

    async def probe_all(self) -> None:
        """Ask every back end."""
        replicas = self._fleet.replicas
        self._num_rounds += 1
        self._num_silent = {
            replica: count for replica, count in self._num_silent.items() if replica in replicas
        }
        await asyncio.gather(*map(self._probe, replicas))

    async def _probe(self, replica: Replica) -> None:
        try:
            status, _ = await self._get(replica, self._config.health_path)
        except HttpError as error:
            count = self._num_silent[replica] = self._num_silent.get(replica, 0) + 1
            if count >= MAX_SILENT:
                self._fleet.give_up(replica)
            elif error.kind == "connect":  # what is under way there may still come to its end
                self._fleet.fail(replica, is_certain=True)
            return
        self._num_silent.pop(replica, None)
        if status >= 500:
            self._fleet.fail(replica)
            return
        self._fleet.note_probe(replica)
        if replica.models is None or self._num_rounds % _ROUNDS_OF_MODELS == 0:
            await self._learn_models(replica, self._headers)

    async def learn_again(self, replicas: Iterable[Replica], headers: Mapping[str, str]) -> None:
        """Ask back ends what they serve, which has changed; until they have said so, each may serve
        anything."""
        asked = tuple(replicas)
        for replica in asked:
            replica.models = None
        await asyncio.gather(
            *(self._learn_models(each, {**self._headers, **headers}) for each in asked)
        )

    async def _learn_models(self, replica: Replica, headers: Mapping[str, str]) -> None:
        self._num_lists += 1
        number = self._num_lists
        try:
            status, body = await self._get(replica, "/v1/models", headers)
            if status == 200 and number > replica.models_number:  # no later one has come before it
                data = msgspec.json.decode(body, type=ModelList).data[:_MAX_MODELS]
                replica.models = frozenset(model.id for model in data)
                replica.models_number = number
        except (HttpError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log_failure(logger, f"the models of {replica.name} cannot be read", error)

    async def _get(
        self, replica: Replica, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Ask on a connection of its own: one that is kept may be stuck behind something. The whole
        answer has the time of one, so that a trickle of bytes keeps no other probe waiting.
        """
        config, address = self._config, replica.client.address
        scheme = "https" if address.is_secure else "http"
        url = f"{scheme}://{address.netloc}{address.path}"
        async with HttpClient(
            url,
            timeout_s=config.health_timeout_s,
            connect_timeout_s=config.connect_timeout_s,
            host_name=replica.client.host_name,
        ) as client:
            try:
                async with counted_timeout(config.connect_timeout_s + config.health_timeout_s):
                    answer = await client.request(
                        HttpRequest(
                            "GET", path, headers=self._headers if headers is None else headers
                        )
                    )
            except TimeoutError:
                raise HttpError("the answer to a probe did not end", kind="timeout") from None
        return answer.status, answer.body
