"""Parts of a checkpoint: ranks that hold a split model together write one checkpoint, each its own part.

How it works. Each of these ranks has a `BackgroundWriter`, whose thread alone uses the transport between them. Rank 0
there leads: it makes the folder, writes what belongs to no parameter, and gives the folder its name when all parts are
complete. For every checkpoint:

    leader -> others   BEGIN, with the name of the folder; or none, if it cannot write at all: the others are done then
    others -> leader   REPLY: the files of the part with their checksums; or an error; or that it must be sent
    leader -> others   GO for each block of such a part, and the block in return; STOP after the last, or before
    leader -> others   END, when the checkpoint has its name or has failed

Hosts need not share a file system. The folder is new, and has a random name. So a rank that sees a folder of this name
under the path of the run sees the leader's, and writes into it. A rank that does not see it sends its part to the
leader, which writes it: one rank after the other and one block at a time, so that the memory that this takes has a
bound. That is decided for each checkpoint, as it costs one look at the file system.

Waits. The leader waits for the REPLY of a rank and for its blocks, which the disk of that rank ends; another rank waits
for BEGIN, GO and END. The leader sends BEGIN for every snapshot that was taken, and END whatever has happened
meanwhile. If a rank is lost, the transport ends the waits of all others, and the checkpoint fails. It has no name then:
only the leader gives it one, with all checksums at hand. A rank that is cut off and writes late does so in a folder
that nobody will look at, as the next one has another name.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.checkpoint.durable import explained_errors
from tutti.checkpoint.index import StoredFile, folder_name, part_file, size_problem
from tutti.checkpoint.parallel import in_parallel
from tutti.checkpoint.tensor_files import tensor_blocks, write_blocks, write_tensors
from tutti.collectives.messages import receive_json, send_json
from tutti.errors import CheckpointError, TuttiError
from tutti.transports import Transport

if TYPE_CHECKING:
    from tutti.checkpoint.snapshots import EncodedSnapshot

_GO, _STOP = 1, 0
_FAILED = -1
"""The length of a block that could not be made."""


@dataclass(frozen=True)
class WrittenPart:
    """The part of a checkpoint that one rank has written."""

    files: dict[str, StoredFile]
    """What was written, by name."""
    trees: dict[str, Any]
    """JSON values, by name of the file that has their tensors."""


def write_part(folder: Path, snapshot: "EncodedSnapshot", part: int, parts: int) -> WrittenPart:
    """Write the files of one of several parts, each into a folder that is there."""
    names = {file: part_file(file, part, parts) for file in snapshot.tensors}
    # All files at once: one core computes checksums no faster than a disk writes. A failure waits for the others.
    stored = in_parallel(write_tensors, [(folder / names[file], each) for file, each in snapshot.tensors.items()])
    trees = {names[file]: tree for file, tree in snapshot.trees.items()}
    return WrittenPart(dict(zip(names.values(), stored, strict=True)), trees)


class PartRanks:
    """The ranks that write together, and the thread of this one that uses the transport between them.

    One thread for the checkpoints of all folders: all ranks take them in the same order.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.thread = ThreadPoolExecutor(1, "tutti-checkpoint")

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that leads."""
        return self.transport.rank == 0

    def decline(self) -> None:
        """Let the others know that the leader does not write a checkpoint, after those that were submitted."""
        end = OtherParts(self.transport).end
        if self.transport.cluster is None:
            self.thread.submit(end)
        else:  # Messages in virtual time belong to the thread of the simulated rank.
            end()

    def close(self) -> None:
        """End the thread, after what was submitted. The transport is its owner's to close."""
        self.thread.shutdown()


class OtherParts:
    """The parts that other ranks write, as their leader sees them. Used by one thread."""

    def __init__(self, transport: Transport) -> None:
        """The ranks of the transport write together."""
        self._transport = transport
        self._has_begun = False
        self._unanswered: list[int] = []
        """Ranks that have begun, and have not replied."""

    @property
    def num_parts(self) -> int:
        """Number of parts, this rank's included."""
        return self._transport.size

    def begin(self, folder: Path | None) -> None:
        """Let all others write into a new folder; without one, let them know that nothing is written."""
        self._has_begun = folder is not None
        try:
            for peer in range(1, self.num_parts):
                send_json({"folder": None if folder is None else folder.name}, self._transport, peer)
                if folder is not None:
                    self._unanswered.append(peer)
        except TuttiError as error:
            raise CheckpointError(f"not all ranks are there that write parts of the checkpoint: {error}") from error

    def collect(self, folder: Path) -> list[WrittenPart]:
        """Wait for the parts of all others. Raises `CheckpointError` if some are not complete."""
        parts, problems = [], []
        while self._unanswered:
            peer = self._unanswered[0]
            try:
                parts.append(self._written(folder, peer, self._reply(peer)))
            except CheckpointError as error:
                problems.append(f"rank {self._transport.world_ranks[peer]}: {error}")
            except TuttiError as error:  # A rank is lost: nothing more can be received here.
                raise CheckpointError(
                    f"not all parts of the checkpoint in {folder.parent} are there: {error}"
                ) from error
        if problems:
            raise CheckpointError(" ".join(problems))
        return parts

    def end(self) -> None:
        """End the part of all others in this checkpoint, whatever has become of it."""
        with suppress(TuttiError):  # A rank is lost. The others are told so as well.
            if not self._has_begun:
                self.begin(None)
                return
            while self._unanswered:  # This rank has failed before it asked for them.
                peer = self._unanswered[0]
                if "sends" in self._reply(peer):
                    self._ask(peer, _STOP)
            for peer in range(1, self.num_parts):
                send_json("end", self._transport, peer)
        self._has_begun, self._unanswered = False, []

    def _reply(self, peer: int) -> dict[str, Any]:
        reply: dict[str, Any] = receive_json(self._transport, peer)
        self._unanswered.remove(peer)
        return reply

    def _written(self, folder: Path, peer: int, reply: dict[str, Any]) -> WrittenPart:
        """Return the part of a rank that has written it, or sends it now."""
        if "error" in reply:
            raise CheckpointError(reply["error"])
        files: dict[str, StoredFile] = {}
        if "sends" in reply:
            try:
                with explained_errors("write what it has sent"):
                    for name in reply["sends"]:
                        files[name] = write_blocks(folder / name, self._blocks(peer))
            finally:
                self._ask(peer, _STOP)
        else:
            files = {name: StoredFile(**entry) for name, entry in reply["files"].items()}
            if problems := [text for name, file in files.items() if (text := size_problem(folder / name, file))]:
                raise CheckpointError(
                    f"what it has written is not seen by the rank that leads: {'; '.join(problems)}. Choose a folder "
                    "that is the same on all hosts, or that only one host has."
                )
        return WrittenPart(files, reply["trees"])

    def _blocks(self, peer: int) -> Iterator[memoryview]:
        """Receive the blocks of one file, each after it was asked for."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        while True:
            self._ask(peer, _GO)
            self._transport.irecv(length, peer).wait()
            if int(length) == _FAILED:
                raise CheckpointError("it could not send its part: see its output.")
            if int(length) == 0:
                return
            # Of its own: it is written and hashed while the next one comes.
            block = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            self._transport.irecv(block, peer).wait()
            yield memoryview(block.numpy())  # type: ignore[arg-type]

    def _ask(self, peer: int, what: int) -> None:
        self._transport.isend(torch.tensor([what], device="cpu"), peer).wait()


class PartWriter:
    """Writes this rank's part of every checkpoint, where another rank leads. Used by one thread."""

    def __init__(self, run: Path, keep: int, transport: Transport) -> None:
        self._run, self.keep, self._transport = run, keep, transport

    def write(self, snapshot: "EncodedSnapshot") -> Path:
        """Write this rank's part, and return the folder that the checkpoint gets. Ended by the leader.

        Raises `CheckpointError` if this part could not be written. If another could not, that rank and the leader say
        so.
        """
        final = self._run / folder_name(snapshot.steps)
        try:
            folder = receive_json(self._transport, 0)["folder"]
            if folder is not None:
                self._write_into(self._run / folder, snapshot)
                receive_json(self._transport, 0)
        except CheckpointError as error:
            raise CheckpointError(f"rank {self._transport.world_rank}: {error}") from error
        except TuttiError as error:
            raise CheckpointError(f"the checkpoint {final} was not completed: {error}") from error
        return final

    def close(self) -> None:
        """Do nothing: the leader has the lock of the folder."""
        return None

    def _write_into(self, folder: Path, snapshot: "EncodedSnapshot") -> None:
        transport, sees = self._transport, _sees(folder)
        try:
            with explained_errors(f"write a part of the checkpoint {self._run / folder_name(snapshot.steps)}"):
                if sees:
                    reply = asdict(write_part(folder, snapshot, transport.rank, transport.size))
                else:
                    names = {file: part_file(file, transport.rank, transport.size) for file in snapshot.tensors}
                    trees = {names[file]: tree for file, tree in snapshot.trees.items()}
                    reply = {"sends": list(names.values()), "trees": trees}
        except BaseException as error:  # Of any kind: the leader waits.
            send_json({"error": str(error) if isinstance(error, CheckpointError) else repr(error)}, transport, 0)
            receive_json(transport, 0)
            raise
        send_json(reply, transport, 0)
        if not sees:
            self._send(snapshot)

    def _send(self, snapshot: "EncodedSnapshot") -> None:
        """Send this rank's part to the leader, block by block as it asks for them."""
        transport = self._transport
        request = torch.empty(1, dtype=torch.int64, device="cpu")
        blocks, failure = _with_ends(snapshot.tensors.values()), None
        while True:
            block = None
            try:
                block = next(blocks, None)
            except Exception as error:  # Of any kind: the leader waits.
                failure = error
            transport.irecv(request, 0).wait()
            if int(request) == _STOP:
                break
            transport.isend(torch.tensor([_FAILED if block is None else len(block)], device="cpu"), 0).wait()
            if block:
                transport.isend(torch.frombuffer(block, dtype=torch.uint8), 0).wait()
        if failure is not None:
            receive_json(transport, 0)  # Otherwise it would be taken for the BEGIN of the next checkpoint.
            raise failure


def _with_ends(files: Iterable[Mapping[str, Tensor]]) -> Iterator[memoryview]:
    """Yield the blocks of files of tensors, and an empty one at the end of each file."""
    for tensors in files:
        yield from tensor_blocks(tensors)
        yield memoryview(b"")


def _sees(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # It may not be looked at: its path belongs to another user on this host, for example.
        return False
