//! Transfers that break off, are damaged, given up, shared or refused.
//!
//! Not here: the wire and the two ends (`super`).

use super::*;

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
/// A transfer that is late does not give way to pushes, see `traffic`.
#[tokio::test]
async fn links_are_late_from_half_of_the_log_that_is_held_for_them() {
    let mut scene = Scene::new();
    scene.source.hold_bytes = 100_000;
    let group = scene.source.log.clone();
    let append = |bytes: usize| {
        let index = group.state().last.map_or(1, |last| last.index + 1);
        let payload = Bytes::from(vec![0; bytes]);
        let entry = Entry { index, term: 3, leader: SENDER, kind: 0, time_ms: 0, payload };
        group.append(vec![entry], Box::new(|result| result.expect("appended")));
        scene.log.pump();
    };
    for _ in 0..90 {
        append(1_000);
    }
    assert!(!scene.source.is_late(), "nothing is held for anybody");
    let set = scene.source.link(90).await.expect("linked");
    assert_eq!(set.index(), 90, "what came before does not count");
    assert!(!scene.source.is_late());
    for _ in 0..40 {
        append(1_000);
    }
    assert!(!scene.source.is_late(), "{} bytes", scene.source.log.bytes_since(90));
    for _ in 0..11 {
        append(1_000);
    }
    assert!(scene.source.is_late(), "{} bytes", scene.source.log.bytes_since(90));
}

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
