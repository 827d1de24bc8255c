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
use evershard_storage::log::{Driver, Log, LogOptions};
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

async fn frames_of_a_whole_transfer() -> u64 {
    let scene = Scene::new();
    scene.send().await.expect("sent");
    scene.assert_installed("without a fault");
    assert_eq!(scene.figures().bytes_sent, scene.total());
    scene.wire.frames.load(Ordering::Relaxed)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restart {
    Nobody,
    Receiver,
    Sender,
    Both,
}

#[tokio::test]
async fn a_transfer_that_breaks_at_any_frame_is_gone_on_with() {
    let frames = frames_of_a_whole_transfer().await;
    assert!(frames >= 14, "{frames}");
    let mut skipped_most = 0;
    for restart in [Restart::Nobody, Restart::Receiver, Restart::Sender, Restart::Both] {
        for fault in [Fault::Lost, Fault::AnswerLost] {
            for at in 0..frames {
                let case = format!("{fault:?} at frame {at}, restart of {restart:?}");
                let mut scene = Scene::new();
                *scene.wire.fault.lock() = Some((at, fault));
                let broken = scene.send().await.expect_err("it breaks");
                assert!(matches!(broken, SendError::Transport(_)), "{case}: {broken}");
                let there = worth_keeping(&scene.wire.incoming);
                if at == frames - 1 && fault == Fault::AnswerLost {
                    scene.assert_installed(&case);
                } else {
                    assert!(scene.wire.installed.lock().is_none(), "{case}");
                }
                scene.wire.mend();
                if matches!(restart, Restart::Receiver | Restart::Both) {
                    scene.wire.restart_receiver();
                }
                if matches!(restart, Restart::Sender | Restart::Both) {
                    scene.restart_sender();
                }
                let before = scene.figures();
                scene.send().await.unwrap_or_else(|error| panic!("{case}: {error}"));
                scene.assert_installed(&case);
                let after = scene.figures();
                assert_eq!(after.bytes_skipped, there, "{case}");
                assert_eq!(after.resumed, u64::from(there > 0), "{case}");
                assert_eq!(after.bytes_sent - before.bytes_sent, scene.total() - there, "{case}");
                skipped_most = skipped_most.max(there);
            }
        }
    }
    assert_eq!(skipped_most, (10 * CHUNK - 11) as u64, "all of the large files");
}

#[tokio::test]
async fn a_flipped_byte_is_noticed_and_only_its_chunk_sent_again() {
    let frames = frames_of_a_whole_transfer().await;
    for fault in [Fault::FlippedOnTheWire, Fault::FlippedInMemory] {
        // Of Begin and Finish it ends the attempt.
        for at in 1..frames - 1 {
            let case = format!("{fault:?} at frame {at}");
            let scene = Scene::new();
            *scene.wire.fault.lock() = Some((at, fault));
            scene.send().await.unwrap_or_else(|error| panic!("{case}: {error}"));
            scene.assert_installed(&case);
            let figures = scene.figures();
            assert_eq!(figures.chunks_repeated, 1, "{case}");
            assert_eq!(figures.bytes_received, scene.total(), "{case}: nothing was written twice");
            let again = figures.bytes_sent - scene.total();
            assert!(again > 0 && again <= CHUNK as u64, "{case}: {again} bytes were sent again");
        }
        for at in [0, frames - 1] {
            let scene = Scene::new();
            *scene.wire.fault.lock() = Some((at, fault));
            scene.send().await.expect_err("refused");
            assert!(scene.wire.installed.lock().is_none());
            scene.wire.mend();
            scene.send().await.expect("sent");
            scene.assert_installed("again");
        }
    }
}

/// A power cut at the receiver: of the last chunk, and of the journal, any part may be lost.
#[tokio::test]
async fn what_a_power_cut_tore_is_fetched_again() {
    let whole = (7 * CHUNK - 11) as u64;
    for lost in 0..=150u64 {
        let scene = Scene::new();
        // Begin, meta, six chunks of the first large file.
        *scene.wire.fault.lock() = Some((8, Fault::Lost));
        scene.send().await.expect_err("it breaks");
        assert_eq!(worth_keeping(&scene.wire.incoming), 6 * CHUNK as u64);
        let journal = std::fs::read_dir(&scene.wire.incoming)
            .expect("a folder")
            .map(|entry| entry.expect("entry").path())
            .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("chunks-")))
            .expect("a journal");
        let bytes = std::fs::metadata(&journal).expect("metadata").len();
        std::fs::OpenOptions::new()
            .write(true)
            .open(&journal)
            .and_then(|file| file.set_len(bytes.saturating_sub(lost)))
            .expect("cut");
        scene.wire.mend();
        scene.wire.restart_receiver();
        scene.send().await.expect("sent");
        scene.assert_installed(&format!("{lost} bytes of the journal lost"));
        let kept = 6u64.saturating_sub(lost.div_ceil(24)) * CHUNK as u64;
        assert_eq!(scene.figures().bytes_skipped, kept, "{lost}");
    }
    for damaged in 0..6u64 {
        let scene = Scene::new();
        *scene.wire.fault.lock() = Some((8, Fault::Lost));
        scene.send().await.expect_err("it breaks");
        let path = scene.wire.incoming.join("files/rocks/000001.sst");
        let mut bytes = std::fs::read(&path).expect("read");
        bytes[damaged as usize * CHUNK + 5_000] ^= 0x40;
        std::fs::write(&path, bytes).expect("written");
        scene.wire.mend();
        scene.wire.restart_receiver();
        scene.send().await.expect("sent");
        scene.assert_installed(&format!("chunk {damaged} damaged"));
        assert_eq!(scene.figures().bytes_skipped, damaged * CHUNK as u64);
    }
    for manifest in [&b""[..], b"EVSHRECV", &[0; 200]] {
        let scene = Scene::new();
        *scene.wire.fault.lock() = Some((8, Fault::Lost));
        scene.send().await.expect_err("it breaks");
        std::fs::write(scene.wire.incoming.join("manifest"), manifest).expect("written");
        scene.wire.mend();
        scene.wire.restart_receiver();
        scene.send().await.expect("sent");
        scene.assert_installed("the manifest is damaged");
        assert_eq!(scene.figures().bytes_skipped, 0);
    }
    assert!(whole > 6 * CHUNK as u64);
}

/// The sender has flushed and compacted meanwhile: a file is new, one is gone, one has the same name and size and other bytes.
#[tokio::test]
async fn of_a_later_snapshot_only_what_is_new_is_sent() {
    for restart in [false, true] {
        let mut scene = Scene::new();
        let frames = frames_of_a_whole_transfer().await;
        *scene.wire.fault.lock() = Some((frames - 1, Fault::Lost));
        scene.send().await.expect_err("it breaks");
        let source = scene.machine.source.clone();
        let replace = |name: &str, bytes: Vec<u8>| {
            let path = source.join(name);
            let _ = std::fs::remove_file(&path);
            std::fs::write(path, bytes).expect("written");
        };
        replace("meta", noise(11, 100));
        replace("rocks/000002.sst", noise(12, 3 * CHUNK));
        replace("rocks/000009.sst", noise(13, 2 * CHUNK));
        scene.machine.index.store(120, Ordering::Relaxed);
        if restart {
            scene.wire.restart_receiver();
        }
        scene.restart_sender();
        scene.wire.mend();
        let before = scene.figures();
        scene.send().await.expect("sent");
        scene.assert_installed("a later snapshot");
        let same = (7 * CHUNK - 11) as u64;
        assert_eq!(scene.figures().bytes_skipped, same, "the large file that did not change");
        assert_eq!(scene.figures().bytes_sent - before.bytes_sent, scene.total() - same);
    }
}

#[tokio::test]
async fn another_senders_files_are_not_gone_on_with() {
    let scene = Scene::new();
    *scene.wire.fault.lock() = Some((9, Fault::Lost));
    scene.send().await.expect_err("it breaks");
    scene.wire.mend();
    scene.send_as(8).await.expect("sent");
    scene.assert_installed("another sender");
    assert_eq!(scene.figures().bytes_skipped, 0);
}

#[tokio::test]
async fn what_is_given_up_leaves_no_files() {
    // The sender cannot read its files: it says so.
    let scene = Scene::new();
    let linked = scene.source.link(0).await.expect("linked");
    std::fs::OpenOptions::new()
        .write(true)
        .open(scene.machine.source.join("rocks/000002.sst"))
        .and_then(|file| file.set_len(10))
        .expect("cut short");
    let error = scene.send().await.expect_err("a file is short");
    assert!(matches!(error, SendError::Read { .. }), "{error}");
    assert!(!scene.wire.incoming.exists(), "{:?}", contents(&scene.wire.incoming));
    drop(linked);

    // Nobody goes on: the receiver waits a while.
    for restart in [false, true] {
        let scene = Scene::new();
        *scene.wire.fault.lock() = Some((8, Fault::Lost));
        scene.send().await.expect_err("it breaks");
        if restart {
            scene.wire.restart_receiver();
        }
        let installer = Arc::clone(&scene.wire.installer.lock());
        for _ in 0..3 {
            installer.look(3);
            assert!(scene.wire.incoming.exists());
        }
        installer.look(3);
        assert!(!scene.wire.incoming.exists());
        scene.wire.mend();
        scene.send().await.expect("sent from the beginning");
        scene.assert_installed("after it was given up");
    }
}

#[tokio::test]
async fn receivers_share_links_and_links_go_when_unused() {
    let scene = Scene::new();
    let (first, second) = futures_util::future::join(scene.source.link(0), scene.source.link(90)).await;
    let (first, second) = (first.expect("linked"), second.expect("linked"));
    assert!(Arc::ptr_eq(&first, &second), "one set for both");
    assert_eq!(scene.machine.linked.load(Ordering::Relaxed), 1);
    assert_eq!(scene.source.held_index(), Some(90), "the log behind it is kept");

    // openraft was told of a later mark: links of an earlier one would have it believe what is not so.
    scene.machine.index.store(120, Ordering::Relaxed);
    let later = scene.source.link(120).await.expect("linked");
    assert_eq!(later.mark.position.expect("somewhere").index, 120);
    let earlier = first.directory().to_owned();
    assert!(earlier.exists(), "it is still being sent");
    drop((first, second));
    assert!(!earlier.exists());

    let directory = later.directory().to_owned();
    for _ in 0..10 {
        scene.source.look(2);
    }
    assert!(directory.exists(), "it is in use");
    drop(later);
    scene.source.look(2);
    scene.source.look(2);
    assert!(directory.exists(), "for a while it stays");
    assert_eq!(scene.source.held_index(), Some(120));
    scene.source.look(2);
    assert!(!directory.exists());
    assert_eq!(scene.source.held_index(), None);
}

/// Needs `--features failpoints`: a disk that is full.
#[cfg(feature = "failpoints")]
#[tokio::test]
async fn a_full_disk_is_said_and_a_later_attempt_succeeds() {
    let scene = Scene::new();
    fail::cfg("snapshot::no_room", "1*return").expect("armed");
    let error = scene.send().await.expect_err("no room");
    assert!(error.is_no_space(), "{error}");
    assert_eq!(scene.figures().bytes_sent, 0, "refused before its first byte");

    fail::cfg("snapshot::write", "5*off->1*return").expect("armed");
    let error = scene.send().await.expect_err("full in the middle");
    assert!(error.is_no_space(), "{error}");
    assert!(!scene.wire.incoming.exists(), "the room is given back");
    assert!(scene.wire.installed.lock().is_none());
    scene.send().await.expect("there is room again");
    scene.assert_installed("after a full disk");
}
