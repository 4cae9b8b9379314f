"""Grid in memory: every node is a ClientApp that answers at once, late, wrongly, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Trouble = Callable[[Message], Message | None]


class MemoryGrid(Grid):
    """Nodes by id, each with its ClientApp, its public key and an optional fault."""

    def __init__(self) -> None:
        self.apps: dict[int, object] = {}
        self.keys: dict[int, bytes] = {}
        self.configs: dict[int, dict] = {}
        self.trouble: dict[int, Trouble] = {}
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.contexts: dict[int, Context] = {}
        self._replies: dict[str, Message] = {}
        # Messages can be made only inside a Flower task, so this pretends to be one.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def add(self, node: int, app: object, key: bytes = b"", **config: object) -> None:
        """Bring a node online."""
        self.apps[node], self.keys[node], self.configs[node] = app, key, config

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> object:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.apps]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = str(uuid4())
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            numbers.append(number)
            node = message.metadata.dst_node_id
            reply = self.trouble[node](message) if node in self.trouble else self.answer(message)
            if reply is not None:
                self._replies[number] = reply
        return numbers

    def answer(self, message: Message) -> Message:
        """Return the answer of the node's ClientApp, or the error Flower would report."""
        node = message.metadata.dst_node_id
        if node not in self.apps:
            return lost(message)
        context = self.contexts.setdefault(node, Context(1, node, self.configs[node], RecordDict(), {}))
        try:
            return self.apps[node](message, context)  # type: ignore[operator]
        except Exception as error:  # as in Flower, a node's failure is a reply
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [self._replies.pop(number) for number in message_ids if number in self._replies]
        self.received += replies
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def lost(message: Message) -> Message:
    """Return the reply for a lost node: error 5, with SuperLink's own id as its sender."""
    reply = Message(Error(5, "node unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 1
    return reply
