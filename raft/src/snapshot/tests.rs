//! Whole transfers, sender against receiver, over a wire that breaks, loses and damages at every frame in turn, with either
//! side restarted in between.
//!
//! What must hold, wherever it breaks: what is handed over to install is what was linked, byte for byte; what the receiver had
//! is not sent again; and in the end nothing is left on the receiver's disk.
//!
//! Not here: sockets and groups (`raft/tests/`), processes (the root package's tests).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use evershard_storage::log::{Driver, Entry, Log, LogOptions};
use evershard_storage::testing::SimDisk;
use parking_lot::Mutex;

use super::builder::LinkSource;
use super::installer::{Installer, KEPT_BYTES_MIN, ReceiveError};
use super::message::{self, Begin, Begun, Chunk, Finish, Forget};
use super::stream::{SendError, SnapshotSender};
use super::traffic::{SnapshotFigures, SnapshotTraffic};
use crate::executor::InlineExecutor;
use crate::options::RaftLimits;
use crate::state_machine::{CommittedEntry, Halt, LogPosition, SnapshotError, SnapshotMark, StateMachine};
use crate::transport::{
    Body, FrameKind, Lane, Refusal, ReplyFuture, Target, Transport, TransportError, codec,
};
use crate::type_config::{LeaderId, Peer, Tokio, Vote};

mod transfers;

const CHUNK: usize = 32 * 1024;
const SENDER: u64 = 7;

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// A state machine that is its files: links are of `source` as it is then.
struct Files {
    source: PathBuf,
    index: AtomicU64,
    linked: AtomicU64,
}

impl StateMachine for Files {
    fn recovered(&self) -> SnapshotMark {
        self.snapshot_mark()
    }

    fn apply(&self, _entries: &[CommittedEntry]) -> Result<Vec<Bytes>, Halt> {
        Ok(Vec::new())
    }

    fn snapshot_mark(&self) -> SnapshotMark {
        let index = self.index.load(Ordering::Relaxed);
        SnapshotMark {
            position: Some(LogPosition { term: 3, leader: SENDER, index }),
            membership: Bytes::from_static(b"members"),
        }
    }

    fn link_snapshot(&self, directory: &Path) -> Result<SnapshotMark, SnapshotError> {
        self.linked.fetch_add(1, Ordering::Relaxed);
        for (name, _) in contents(&self.source) {
            let path = directory.join(&name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::hard_link(self.source.join(&name), path).expect("linked");
        }
        Ok(self.snapshot_mark())
    }

    fn install_snapshot(&self, _mark: &SnapshotMark, _directory: &Path) -> Result<(), SnapshotError> {
        Ok(())
    }
}

/// All files below a folder, by name.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).into_iter().flatten() {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).expect("below").to_str().expect("text").to_owned();
                found.push((name, std::fs::read(&path).expect("read")));
            }
        }
    }
    found.sort();
    found
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The connection breaks before the frame arrives.
    Lost,
    /// It breaks before the answer arrives.
    AnswerLost,
    /// A byte flips on the way, and the frame's crc32 tells.
    FlippedOnTheWire,
    /// A byte flips in the sender's memory, after it was read: only the chunk's own crc32 tells.
    FlippedInMemory,
}

/// Names and contents.
type Contents = Vec<(String, Vec<u8>)>;

/// The way to one receiver, and the receiver.
struct Wire {
    installer: Mutex<Arc<Installer>>,
    incoming: PathBuf,
    traffic: Arc<SnapshotTraffic<Tokio>>,
    frames: AtomicU64,
    fault: Mutex<Option<(u64, Fault)>>,
    is_broken: Mutex<bool>,
    /// What was handed over to install.
    installed: Mutex<Option<Contents>>,
}

impl Wire {
    fn new(incoming: PathBuf, traffic: &Arc<SnapshotTraffic<Tokio>>) -> Arc<Self> {
        let counters = Arc::clone(traffic.counters());
        let installer = Arc::new(Installer::new(incoming.clone(), Arc::new(InlineExecutor), counters));
        Arc::new(Self {
            installer: Mutex::new(installer),
            incoming,
            traffic: Arc::clone(traffic),
            frames: AtomicU64::new(0),
            fault: Mutex::new(None),
            is_broken: Mutex::new(false),
            installed: Mutex::new(None),
        })
    }

    fn mend(&self) {
        *self.is_broken.lock() = false;
        self.frames.store(0, Ordering::Relaxed);
        *self.fault.lock() = None;
    }

    /// Another process with the same disk.
    fn restart_receiver(&self) {
        let counters = Arc::clone(self.traffic.counters());
        *self.installer.lock() =
            Arc::new(Installer::new(self.incoming.clone(), Arc::new(InlineExecutor), counters));
    }

    fn deliver(&self, kind: FrameKind, body: Bytes) -> Result<Bytes, Refusal> {
        let installer = Arc::clone(&self.installer.lock());
        let unreadable = |error: crate::DecodeError| Refusal::Unreadable(error.to_string());
        let done = match kind {
            FrameKind::SnapshotBegin => {
                let kept = installer.begin(Begin::decode(body).map_err(unreadable)?);
                return kept.map(|kept| Begun::Send(kept).encode()).map_err(ReceiveError::into_refusal);
            }
            FrameKind::SnapshotForget => installer.forget(&Forget::decode(body).map_err(unreadable)?),
            FrameKind::SnapshotChunk => installer.chunk(&Chunk::decode(body).map_err(unreadable)?),
            FrameKind::SnapshotAbort => {
                installer.abort(message::decode_abort(body).map_err(unreadable)?);
                Ok(())
            }
            FrameKind::SnapshotFinish => {
                let finish = Finish::decode(body).map_err(unreadable)?;
                let received = installer.finish(&finish).map_err(ReceiveError::into_refusal)?;
                *self.installed.lock() = Some(contents(received.directory()));
                return Ok(message::encode_finished(&vote(SENDER)));
            }
            other => panic!("{other:?}"),
        };
        done.map(|()| codec::encode_done()).map_err(ReceiveError::into_refusal)
    }
}

impl Transport for Wire {
    fn call(&self, target: &Target, _lane: Lane, kind: FrameKind, body: Body) -> ReplyFuture {
        let peer = target.peer.clone();
        let broken =
            TransportError::Unreachable { peer: peer.clone(), reason: "the connection broke".to_owned() };
        let number = self.frames.fetch_add(1, Ordering::Relaxed);
        let fault = self.fault.lock().filter(|(at, _)| *at == number).map(|(_, fault)| fault);
        let outcome = if *self.is_broken.lock() {
            Err(broken)
        } else {
            let mut body = body.into_bytes();
            match fault {
                Some(Fault::Lost) => {
                    *self.is_broken.lock() = true;
                    Err(broken)
                }
                Some(Fault::AnswerLost) => {
                    let _ = self.deliver(kind, body);
                    *self.is_broken.lock() = true;
                    Err(broken)
                }
                Some(Fault::FlippedOnTheWire) => {
                    Err(TransportError::Refused { peer, refusal: Refusal::Unreadable("crc32".to_owned()) })
                }
                Some(Fault::FlippedInMemory) | None => {
                    if fault.is_some() {
                        let mut bytes = body.to_vec();
                        *bytes.last_mut().expect("not empty") ^= 1;
                        body = Bytes::from(bytes);
                    }
                    self.deliver(kind, body).map_err(|refusal| TransportError::Refused { peer, refusal })
                }
            }
        };
        Box::pin(std::future::ready(outcome))
    }
}

fn vote(replica: u64) -> Vote {
    Vote { leader_id: LeaderId { term: 3, node_id: replica }, committed: true }
}

struct Scene {
    folder: tempfile::TempDir,
    machine: Arc<Files>,
    log: Log,
    traffic: Arc<SnapshotTraffic<Tokio>>,
    wire: Arc<Wire>,
    source: LinkSource,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let source = folder.path().join("source");
        std::fs::create_dir_all(source.join("rocks")).expect("made");
        let machine = Arc::new(Files { source, index: AtomicU64::new(90), linked: AtomicU64::new(0) });
        let scene_files = [
            ("meta", noise(1, 100)),
            ("rocks/000001.sst", noise(2, 7 * CHUNK - 11)),
            ("rocks/000002.sst", noise(3, 3 * CHUNK)),
            ("rocks/CURRENT", Vec::new()),
            ("rocks/MANIFEST-000003", noise(4, 5_000)),
        ];
        for (name, bytes) in scene_files {
            std::fs::write(machine.source.join(name), bytes).expect("written");
        }
        let (log, _) =
            Log::open(LogOptions::new("/log"), Arc::new(SimDisk::new(1)), Driver::Manual).expect("a log");
        let traffic = SnapshotTraffic::new(&limits());
        let wire = Wire::new(folder.path().join("incoming"), &traffic);
        let source = links(&folder, &machine, &log);
        Self { folder, machine, log, traffic, wire, source }
    }

    /// Another process with the same disk.
    fn restart_sender(&mut self) {
        self.source = links(&self.folder, &self.machine, &self.log);
    }

    async fn send_as(&self, sender: u64) -> Result<Vote, SendError> {
        let target = Target { peer: Peer { node: 2, address: String::new() }, group: 1, replica: 12 };
        let sender = SnapshotSender::<Tokio>::new(
            Arc::clone(&self.wire) as _,
            target,
            vote(sender),
            limits(),
            Arc::clone(&self.traffic),
        );
        sender.send(self.source.clone(), 90).await
    }

    async fn send(&self) -> Result<Vote, SendError> {
        self.send_as(SENDER).await
    }

    fn figures(&self) -> SnapshotFigures {
        self.traffic.figures()
    }

    fn total(&self) -> u64 {
        contents(&self.machine.source).iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    fn assert_installed(&self, case: &str) {
        let installed = self.wire.installed.lock().take();
        assert!(installed.is_some(), "{case}: nothing was installed");
        assert!(installed == Some(contents(&self.machine.source)), "{case}: not what was linked");
        assert!(!self.wire.incoming.exists(), "{case}: {:?}", contents(&self.wire.incoming));
    }
}

fn limits() -> RaftLimits {
    RaftLimits { snapshot_chunk_bytes: CHUNK, ..RaftLimits::default() }
}

fn links(folder: &tempfile::TempDir, machine: &Arc<Files>, log: &Log) -> LinkSource {
    LinkSource {
        state_machine: Arc::clone(machine) as _,
        executor: Arc::new(InlineExecutor),
        lane: 1,
        outgoing: folder.path().join("outgoing"),
        log: log.group(1, 1).expect("the group's log"),
        hold_bytes: 1 << 30,
        shelf: Arc::default(),
    }
}

/// What the receiver may keep of its files for the next attempt.
fn worth_keeping(incoming: &Path) -> u64 {
    let Some(found) = super::incoming::Incoming::recover(incoming) else { return 0 };
    (0..found.begin.files.len())
        .filter(|number| found.begin.files[*number].bytes >= KEPT_BYTES_MIN)
        .map(|number| found.map(number).front().bytes)
        .sum()
}
