//! Sending a snapshot: asks what the receiver has, checks that it is the same, streams the rest in chunks, waits until all
//! of it is installed.
//!
//! Invariants:
//! - what the receiver has is skipped only when its crc32 is that of the same bytes here;
//! - a few chunks are in flight, never more; the node's rate bounds the bytes per second;
//! - a chunk that arrives damaged is sent again, alone;
//! - an attempt that breaks off leaves the receiver what it has; only when the files here cannot be read is it told to
//!   forget it;
//! - files are read on blocking threads, and leave nothing behind in the system's cache.
//!
//! Not here: receiving (`installer`), when to send (openraft), what is linked (`builder`).

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use evershard_storage::disk::forget_cached;
use tokio::sync::OwnedSemaphorePermit;

use super::builder::{LinkSet, LinkSource, LinkedFile};
use super::message::{Begin, Begun, Chunk, Finish, Forget, Kept, decode_finished, encode_abort};
use super::progress::Progress;
use super::traffic::SnapshotTraffic;
use crate::cursor::DecodeError;
use crate::executor::{self, ApplyExecutor, WorkLost};
use crate::options::RaftLimits;
use crate::state_machine::SnapshotError;
use crate::transport::{
    Body, FrameKind, Lane, Refusal, ReplyFuture, Target, Transport, TransportError, codec,
};
use crate::type_config::{Runtime, Vote};

/// Chunks in flight.
const WINDOW: usize = 4;
/// Times that a chunk is sent before its bytes are given up.
const TRIES_MAX: u32 = 4;
/// Read at once when only the crc32 is wanted.
const CHECK_BYTES: usize = 4 << 20;
/// For one answer, other than the first and the last.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// For the first answer: the receiver may read again all that it has.
const BEGIN_WITHIN: Duration = Duration::from_secs(10 * 60);
/// For the last answer: the receiver syncs, verifies and loads.
const INSTALL_WITHIN: Duration = Duration::from_secs(30 * 60);

/// Why a snapshot was not received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error(transparent)]
    Link(#[from] SnapshotError),
    #[error("reading {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the answer cannot be read: {0}")]
    Decode(#[from] DecodeError),
    #[error("the receiver answered for {found} of {expected} files")]
    Files { found: usize, expected: usize },
    #[error(transparent)]
    Lost(#[from] WorkLost),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("the log behind the snapshot is gone: a later one is sent, of which the receiver has most")]
    Overtaken,
}

impl SendError {
    /// Whether the receiver has no room: asking again at once would help nobody.
    pub(crate) fn is_no_space(&self) -> bool {
        matches!(self, Self::Transport(TransportError::Refused { refusal: Refusal::NoSpace(_), .. }))
    }

    /// Whether what the receiver has is of no use: the files here cannot be read.
    fn spoils_parts(&self) -> bool {
        matches!(self, Self::Read { .. })
    }
}

static NEXT_TRANSFER: AtomicU64 = AtomicU64::new(1);

/// Sends one snapshot to one replica.
pub(crate) struct SnapshotSender<RT: Runtime> {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) target: Target,
    pub(crate) vote: Vote,
    pub(crate) limits: RaftLimits,
    pub(crate) traffic: Arc<SnapshotTraffic<RT>>,
    transfer: u64,
}

/// A chunk that was sent and not answered.
struct InFlight {
    chunk: Chunk,
    tries: u32,
    reply: ReplyFuture,
}

impl<RT: Runtime> SnapshotSender<RT> {
    pub(crate) fn new(
        transport: Arc<dyn Transport>,
        target: Target,
        vote: Vote,
        limits: RaftLimits,
        traffic: Arc<SnapshotTraffic<RT>>,
    ) -> Self {
        // Other leaders have other terms, and so has this one after a restart: no two transfers share a number.
        let transfer =
            (vote.leader_id.term << 32) | (NEXT_TRANSFER.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff);
        Self { transport, target, vote, limits, traffic, transfer }
    }

    /// Sends a state at `at_least` or after, and waits for the install; answers with the receiver's vote.
    pub(crate) async fn send(self, source: LinkSource, at_least: u64) -> Result<Vote, SendError> {
        let counters = Arc::clone(self.traffic.counters());
        let place = self.traffic.admit().await;
        let sent = match source.link(at_least).await {
            Ok(linked) => self.send_linked(&linked, &source, place).await,
            Err(error) => Err(error.into()),
        };
        match &sent {
            Ok(_) => counters.sent.add(1),
            Err(error) => {
                counters.failed.add(1);
                if error.spoils_parts() {
                    let abort = self.call(FrameKind::SnapshotAbort, Body::ready(encode_abort(self.transfer)));
                    // That it is not heard costs the receiver only room, and only for a while.
                    let _ = RT::timeout(ANSWER_WITHIN, abort).await;
                }
            }
        }
        sent
    }

    async fn send_linked(
        &self,
        linked: &LinkSet,
        source: &LinkSource,
        place: Option<OwnedSemaphorePermit>,
    ) -> Result<Vote, SendError> {
        let begin = Begin {
            transfer: self.transfer,
            vote: self.vote,
            mark: linked.mark.clone(),
            files: linked.files.iter().map(|file| file.entry.clone()).collect(),
        };
        let begun = self.call(FrameKind::SnapshotBegin, Body::ready(begin.encode()));
        let mut kept = match Begun::decode(self.answer(begun, BEGIN_WITHIN).await?)? {
            Begun::Send(kept) => kept,
            Begun::Unneeded(vote) => return Ok(vote),
        };
        if kept.len() != linked.files.len() {
            return Err(SendError::Files { found: kept.len(), expected: linked.files.len() });
        }
        self.check_kept(linked, source, &mut kept).await?;

        let skipped = kept.iter().map(|file| file.bytes).sum();
        let total = linked.files.iter().map(|file| file.entry.bytes).sum();
        let mut progress = Progress::<RT>::start(&self.target, total, skipped);
        if skipped > 0 {
            self.traffic.counters().resumed.add(1);
            self.traffic.counters().bytes_skipped.add(skipped);
        }
        let mut crc32s = Vec::with_capacity(linked.files.len());
        let mut window = VecDeque::with_capacity(WINDOW);
        for (number, (file, kept)) in (0u32..).zip(linked.files.iter().zip(kept)) {
            crc32s.push(self.send_file(number, file, kept, source, &mut window, &mut progress).await?);
        }
        while let Some(oldest) = window.pop_front() {
            self.settle(oldest, &mut window, &mut progress).await?;
        }
        if source.is_overtaken(linked) {
            return Err(SendError::Overtaken);
        }
        progress.installing();
        drop(place);
        let finish = Finish { transfer: self.transfer, vote: self.vote, crc32s };
        let finished = self.call(FrameKind::SnapshotFinish, Body::ready(finish.encode()));
        let vote = decode_finished(self.answer(finished, INSTALL_WITHIN).await?)?;
        progress.installed();
        Ok(vote)
    }

    /// Compares what the receiver has with the same bytes here, and has it forget what differs.
    async fn check_kept(
        &self,
        linked: &LinkSet,
        source: &LinkSource,
        kept: &mut [Kept],
    ) -> Result<(), SendError> {
        let mut foreign = Vec::new();
        for (number, (file, kept)) in (0u32..).zip(linked.files.iter().zip(kept)) {
            if kept.bytes == 0 {
                continue;
            }
            let same = kept.bytes <= file.entry.bytes
                && crc32_of_front(file, kept.bytes, source).await? == kept.crc32;
            if !same {
                *kept = Kept::default();
                foreign.push(number);
            }
        }
        if foreign.is_empty() {
            return Ok(());
        }
        let forget = Forget { transfer: self.transfer, files: foreign };
        let forgotten = self.call(FrameKind::SnapshotForget, Body::ready(forget.encode()));
        Ok(codec::decode_done(self.answer(forgotten, ANSWER_WITHIN).await?)?)
    }

    /// Sends what the receiver lacks of a file; answers with the crc32 of all of it.
    async fn send_file(
        &self,
        number: u32,
        file: &LinkedFile,
        kept: Kept,
        source: &LinkSource,
        window: &mut VecDeque<InFlight>,
        progress: &mut Progress<RT>,
    ) -> Result<u32, SendError> {
        let mut whole = crc32fast::Hasher::new_with_initial(kept.crc32);
        let mut offset = kept.bytes;
        let mut reader = FileReader::new(file);
        while offset < file.entry.bytes {
            let wanted = (file.entry.bytes - offset).min(self.limits.snapshot_chunk_bytes as u64);
            let data = reader.read(&*source.executor, offset, wanted as usize).await?;
            whole.update(&data);
            let crc32 = crc32fast::hash(&data);
            self.traffic.wait_for(data.len(), source.is_late()).await;
            if window.len() >= WINDOW
                && let Some(oldest) = window.pop_front()
            {
                self.settle(oldest, window, progress).await?;
            }
            let length = data.len() as u64;
            let chunk = Chunk { transfer: self.transfer, file: number, offset, crc32, data };
            window.push_back(self.put(chunk, 1));
            offset += length;
            fail::fail_point!("snapshot::mid_stream");
        }
        let crc32 = whole.finalize();
        source.learn_crc32(file.identity, crc32);
        Ok(crc32)
    }

    fn put(&self, chunk: Chunk, tries: u32) -> InFlight {
        let body = chunk.clone();
        let reply = self.call(FrameKind::SnapshotChunk, Body::lazy(move || body.encode()));
        self.traffic.counters().bytes_sent.add(chunk.data.len() as u64);
        InFlight { chunk, tries, reply }
    }

    /// Waits for a chunk's answer. One that arrived damaged, or whose answer did, is sent again.
    async fn settle(
        &self,
        sent: InFlight,
        window: &mut VecDeque<InFlight>,
        progress: &mut Progress<RT>,
    ) -> Result<(), SendError> {
        let InFlight { chunk, tries, reply } = sent;
        match self.answer(reply, ANSWER_WITHIN).await {
            Ok(done) => {
                codec::decode_done(done)?;
                progress.add(chunk.data.len() as u64);
                Ok(())
            }
            Err(SendError::Transport(
                error @ (TransportError::Damaged { .. }
                | TransportError::Refused { refusal: Refusal::Unreadable(_), .. }),
            )) if tries < TRIES_MAX => {
                tracing::warn!(
                    group = self.target.group,
                    replica = self.target.replica,
                    file = chunk.file,
                    offset = chunk.offset,
                    %error,
                    "a chunk of a snapshot is sent again"
                );
                self.traffic.counters().chunks_repeated.add(1);
                window.push_back(self.put(chunk, tries + 1));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn call(&self, kind: FrameKind, body: Body) -> ReplyFuture {
        self.transport.call(&self.target, Lane::Snapshot, kind, body)
    }

    async fn answer(&self, reply: ReplyFuture, within: Duration) -> Result<Bytes, SendError> {
        Ok(RT::timeout(within, reply).await.map_err(|_| SendError::Timeout(within))??)
    }
}

/// The crc32 of a file's first bytes.
async fn crc32_of_front(file: &LinkedFile, bytes: u64, source: &LinkSource) -> Result<u32, SendError> {
    let is_whole = bytes == file.entry.bytes;
    if is_whole && let Some(known) = source.known_crc32(&file.identity) {
        return Ok(known);
    }
    let mut crc32 = crc32fast::Hasher::new();
    let mut reader = FileReader::new(file);
    let mut offset = 0;
    while offset < bytes {
        let wanted = (bytes - offset).min(CHECK_BYTES as u64);
        let data = reader.read(&*source.executor, offset, wanted as usize).await?;
        crc32.update(&data);
        offset += wanted;
    }
    let crc32 = crc32.finalize();
    if is_whole {
        source.learn_crc32(file.identity, crc32);
    }
    Ok(crc32)
}

/// A file that is opened with its first read, so that a snapshot of many files holds one open at a time.
struct FileReader {
    path: PathBuf,
    file: Option<Arc<File>>,
}

impl FileReader {
    fn new(file: &LinkedFile) -> Self {
        Self { path: file.path.clone(), file: None }
    }

    /// Exactly `bytes` bytes: a file that is shorter than when it was linked is an error.
    async fn read(
        &mut self,
        executor: &dyn ApplyExecutor,
        offset: u64,
        bytes: usize,
    ) -> Result<Bytes, SendError> {
        let (path, opened) = (self.path.clone(), self.file.take());
        let (file, data) = executor::file(executor, move || {
            let read = || {
                let file = match opened {
                    Some(file) => file,
                    None => Arc::new(File::open(&path)?),
                };
                let mut data = vec![0; bytes];
                file.read_exact_at(&mut data, offset)?;
                forget_cached(&file, offset, bytes as u64);
                Ok((file, Bytes::from(data)))
            };
            read().map_err(|source| SendError::Read { path: path.clone(), source })
        })
        .await??;
        self.file = Some(file);
        Ok(data)
    }
}
