"""
The SDK: send files and messages, and receive them by polling.

    async with AsyncClient.of(credentials) as client:
        async for item in client.inbox():
            ...

Failures are raised as the classes of `restante.errors`, selected by the code of the answer.
"""

from restante.client.aio import AsyncClient
from restante.client.calls import Credentials, Cursor, FeedPage
from restante.client.client import (
    BlockingFile,
    BlockingInbox,
    BlockingItem,
    BlockingMessage,
    Client,
)
from restante.client.connection import Limits
from restante.client.messages import rewritten
from restante.client.poller import FileItem, Gaps, Inbox, Item, MessageItem
from restante.client.sending import Bytes
from restante.client.streams import Stream

__all__ = [
    "AsyncClient",
    "BlockingFile",
    "BlockingInbox",
    "BlockingItem",
    "BlockingMessage",
    "Bytes",
    "Client",
    "Credentials",
    "Cursor",
    "FeedPage",
    "FileItem",
    "Gaps",
    "Inbox",
    "Item",
    "Limits",
    "MessageItem",
    "Stream",
    "rewritten",
]
