//! Sending a snapshot: links the state, streams its files in chunks, waits until they are installed.
//!
//! Invariants:
//! - the links live exactly as long as the transfer;
//! - a few chunks are in flight, never more; an optional rate bounds the bytes per second;
//! - an error anywhere ends the transfer and tells the receiver to forget it.
//!
//! Not here: receiving (`installer`), when to send (openraft).

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use openraft::Instant as _;

use super::builder::{LinkSource, LinkedSnapshot};
use super::message::{Begin, Chunk, FileEntry, Finish, decode_begun, decode_finished, encode_abort};
use crate::cursor::DecodeError;
use crate::executor::{self, ApplyExecutor, WorkLost};
use crate::options::RaftLimits;
use crate::state_machine::SnapshotError;
use crate::transport::{Body, FrameKind, Lane, ReplyFuture, Target, Transport, TransportError, codec};
use crate::type_config::{Runtime, Vote};

/// Chunks in flight.
const WINDOW: usize = 4;
/// For one answer, other than the last.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// For the last answer: the receiver syncs, verifies and loads.
const INSTALL_WITHIN: Duration = Duration::from_secs(30 * 60);

/// Why a snapshot was not received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error(transparent)]
    Link(#[from] SnapshotError),
    #[error("reading {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} has a name that cannot be sent")]
    Name { path: PathBuf },
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the answer cannot be read: {0}")]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Lost(#[from] WorkLost),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
}

static NEXT_TRANSFER: AtomicU64 = AtomicU64::new(1);

/// Sends one snapshot to one replica.
pub(crate) struct SnapshotSender<RT> {
    transport: Arc<dyn Transport>,
    target: Target,
    vote: Vote,
    limits: RaftLimits,
    transfer: u64,
    _runtime: PhantomData<fn() -> RT>,
}

/// Tells the receiver to forget a transfer that failed, or that openraft gave up.
struct AbortOnDrop<'a, RT: Runtime> {
    sender: &'a SnapshotSender<RT>,
    is_over: bool,
}

impl<RT: Runtime> Drop for AbortOnDrop<'_, RT> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let SnapshotSender { transport, target, transfer, .. } = self.sender;
        let abort = Body::ready(encode_abort(*transfer));
        let answer = transport.call(target, Lane::Snapshot, FrameKind::SnapshotAbort, abort);
        // A call whose answer nobody waits for is not sent. It ends with its connection at the latest.
        drop(RT::spawn(async move {
            let _ = RT::timeout(ANSWER_WITHIN, answer).await;
        }));
    }
}

impl<RT: Runtime> SnapshotSender<RT> {
    pub(crate) fn new(transport: Arc<dyn Transport>, target: Target, vote: Vote, limits: RaftLimits) -> Self {
        // Other leaders have other terms, and so has this one after a restart: no two transfers share a number.
        let transfer =
            (vote.leader_id.term << 32) | (NEXT_TRANSFER.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff);
        Self { transport, target, vote, limits, transfer, _runtime: PhantomData }
    }

    /// Links, sends, and waits for the install; answers with the receiver's vote.
    pub(crate) async fn send(self, source: LinkSource) -> Result<Vote, SendError> {
        let linked = source.link().await?;
        let mut abort = AbortOnDrop { sender: &self, is_over: false };
        let sent = self.send_linked(&linked, &*source.executor).await;
        abort.is_over = sent.is_ok();
        sent
    }

    async fn send_linked(
        &self,
        linked: &LinkedSnapshot,
        executor: &dyn ApplyExecutor,
    ) -> Result<Vote, SendError> {
        let root = linked.directory().to_owned();
        let files = read(executor, move || list_files(&root)).await?;
        let begin = Begin {
            transfer: self.transfer,
            vote: self.vote,
            mark: linked.mark.clone(),
            files: files.iter().map(|(_, entry)| entry.clone()).collect(),
        };
        let begun = self.call(FrameKind::SnapshotBegin, Body::ready(begin.encode()));
        decode_begun(self.answer(begun, ANSWER_WITHIN).await?)?;

        let mut crc32s = Vec::with_capacity(files.len());
        let mut window = VecDeque::with_capacity(WINDOW);
        let mut pace = Pace::<RT>::start(self.limits.snapshot_bytes_per_second);
        for (number, (path, _)) in files.iter().enumerate() {
            crc32s.push(self.send_file(number as u32, path, executor, &mut window, &mut pace).await?);
        }
        for reply in window {
            codec::decode_done(self.answer(reply, ANSWER_WITHIN).await?)?;
        }
        let finish = Finish { transfer: self.transfer, vote: self.vote, crc32s };
        let finished = self.call(FrameKind::SnapshotFinish, Body::ready(finish.encode()));
        Ok(decode_finished(self.answer(finished, INSTALL_WITHIN).await?)?)
    }

    async fn send_file(
        &self,
        number: u32,
        path: &Path,
        executor: &dyn ApplyExecutor,
        window: &mut VecDeque<ReplyFuture>,
        pace: &mut Pace<RT>,
    ) -> Result<u32, SendError> {
        let opened = path.to_owned();
        let mut file = read(executor, move || {
            File::open(&opened).map_err(|source| SendError::Read { path: opened, source })
        })
        .await?;
        let mut crc32 = crc32fast::Hasher::new();
        let mut offset = 0u64;
        loop {
            let (read_path, chunk_bytes) = (path.to_owned(), self.limits.snapshot_chunk_bytes);
            let (returned, data) = read(executor, move || read_chunk(file, chunk_bytes, read_path)).await?;
            file = returned;
            if data.is_empty() {
                return Ok(crc32.finalize());
            }
            crc32.update(&data);
            pace.wait_for(data.len()).await;
            if window.len() >= WINDOW
                && let Some(oldest) = window.pop_front()
            {
                codec::decode_done(self.answer(oldest, ANSWER_WITHIN).await?)?;
            }
            let chunk = Chunk { transfer: self.transfer, file: number, offset, data };
            offset += chunk.data.len() as u64;
            window.push_back(self.call(FrameKind::SnapshotChunk, Body::lazy(move || chunk.encode())));
            fail::fail_point!("snapshot::mid_stream");
        }
    }

    fn call(&self, kind: FrameKind, body: Body) -> ReplyFuture {
        self.transport.call(&self.target, Lane::Snapshot, kind, body)
    }

    async fn answer(&self, reply: ReplyFuture, within: Duration) -> Result<Bytes, SendError> {
        Ok(RT::timeout(within, reply).await.map_err(|_| SendError::Timeout(within))??)
    }
}

/// Spreads bytes over time.
struct Pace<RT: Runtime> {
    bytes_per_second: Option<u64>,
    next_at: RT::Instant,
}

impl<RT: Runtime> Pace<RT> {
    fn start(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, next_at: RT::Instant::now() }
    }

    async fn wait_for(&mut self, bytes: usize) {
        let Some(rate) = self.bytes_per_second else { return };
        let now = RT::Instant::now();
        if self.next_at > now {
            RT::sleep_until(self.next_at).await;
        } else {
            self.next_at = now;
        }
        self.next_at += Duration::from_secs_f64(bytes as f64 / rate as f64);
    }
}

async fn read<T: Send + 'static>(
    executor: &dyn ApplyExecutor,
    work: impl FnOnce() -> Result<T, SendError> + Send + 'static,
) -> Result<T, SendError> {
    executor::read(executor, work).await?
}

fn read_chunk(mut file: File, bytes: usize, path: PathBuf) -> Result<(File, Bytes), SendError> {
    let mut data = Vec::with_capacity(bytes);
    match file.by_ref().take(bytes as u64).read_to_end(&mut data) {
        Ok(_) => Ok((file, Bytes::from(data))),
        Err(source) => Err(SendError::Read { path, source }),
    }
}

/// All files below `root`, by name, in a fixed order.
fn list_files(root: &Path) -> Result<Vec<(PathBuf, FileEntry)>, SendError> {
    let mut folders = vec![root.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        let read = |source| SendError::Read { path: folder.clone(), source };
        for entry in std::fs::read_dir(&folder).map_err(read)? {
            let path = entry.map_err(read)?.path();
            let meta =
                std::fs::metadata(&path).map_err(|source| SendError::Read { path: path.clone(), source })?;
            if meta.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(root).ok().and_then(Path::to_str).map(str::to_owned);
            let Some(name) = name else { return Err(SendError::Name { path }) };
            files.push((path, FileEntry { name, bytes: meta.len() }));
        }
    }
    files.sort_by(|a, b| a.1.name.cmp(&b.1.name));
    Ok(files)
}
