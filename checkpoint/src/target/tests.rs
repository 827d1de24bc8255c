//! Targets: what is put is there, once; what is not whole is no checkpoint; secrets stay secret.

use bytes::Bytes;
use tempfile::TempDir;

use super::error::redact;
use super::*;
use crate::manifest::{Content, ShardEntry};
use crate::run::{RowHead, Run, RunShape, RunWriter};

fn target() -> (TempDir, Target) {
    let home = TempDir::new().expect("a folder");
    let url = format!("file://{}", home.path().join("a b/ckpt").display());
    let target = Target::create(&url).expect("a target");
    (home, target)
}

fn run(keys: std::ops::Range<u64>) -> Run {
    let mut run = RunWriter::new(4, RunShape { dim: 1, state: 0, notes: 0 }).expect("a shape");
    for key in keys {
        run.push(key, RowHead { version: 1, steps: 0, flags: 0 }, &[key as f32]).expect("it goes in");
    }
    run.finish().expect("rows")
}

async fn content(target: &Target, name: &str) -> Content {
    let mut content = crate::manifest::sample();
    let (entry, _) = target.put_run(&run(0..9)).await.expect("put");
    let (state, _) = target.put_state(&Bytes::from_static(b"small")).await.expect("put");
    let mut shard: ShardEntry = content.shards[1].clone();
    (shard.first_key, shard.state) = (0, state);
    shard.links[0].runs = vec![entry];
    content.shards = vec![shard];
    content.name = name.parse().expect("a name");
    (content.bytes_total, content.bytes_added) = (content.sum_of_bytes(), 0);
    content
}

#[tokio::test]
async fn a_checkpoint_is_there_once_its_manifest_is() {
    let (_home, target) = target();
    assert_eq!(target.list().await.expect("a list"), []);
    let content = content(&target, "one").await;
    assert!(!target.has(&content.name).await.expect("asked"));
    assert!(matches!(target.get_manifest(&content.name).await, Err(TargetError::Unknown { .. })));
    target.finish(&content).await.expect("a checkpoint");
    assert_eq!(target.get_manifest(&content.name).await.expect("there"), content);
    assert_eq!(target.list().await.expect("a list")[0].name, content.name);
    assert!(matches!(target.finish(&content).await, Err(TargetError::Exists { .. })), "never changed");
    // The same bytes are not put again.
    assert!(!target.put_run(&run(0..9)).await.expect("put").1);
    assert!(target.put_run(&run(0..10)).await.expect("put").1);
}

#[tokio::test]
async fn without_all_of_its_files_there_is_no_checkpoint() {
    let (home, target) = target();
    let content = content(&target, "one").await;
    let file = content.shards[0].links[0].runs[0].file();
    let path = home.path().join("a b/ckpt").join(file.path());
    let whole = std::fs::read(&path).expect("the run");
    std::fs::write(&path, &whole[..20]).expect("cut");
    let error = target.finish(&content).await.expect_err("cut").to_string();
    assert!(error.contains(&file.path()) && error.contains("20 bytes"), "{error}");
    std::fs::remove_file(&path).expect("removed");
    let error = target.finish(&content).await.expect_err("gone").to_string();
    assert!(error.ends_with(&format!("{} is missing", file.path())), "{error}");
    assert_eq!(target.list().await.expect("a list"), []);
    // Put again, it is whole again.
    std::fs::write(&path, &whole[..20]).expect("cut");
    assert!(target.put_run(&run(0..9)).await.expect("put").1, "what was cut is not taken for it");
    target.finish(&content).await.expect("a checkpoint");
}

#[tokio::test]
async fn every_flipped_byte_of_a_file_is_noticed() {
    let (home, target) = target();
    let content = content(&target, "one").await;
    let entry = content.shards[0].links[0].runs[0];
    let path = home.path().join("a b/ckpt").join(entry.file().path());
    let whole = std::fs::read(&path).expect("the run");
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&path, &bytes).expect("flipped");
        let mut file = target.read_run(&entry).await.expect("opened");
        let error = loop {
            match file.next().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("byte {at} was not noticed"),
                Err(error) => break error,
            }
        };
        assert!(error.is_damage() && error.to_string().contains(&entry.file().path()), "{error}");
    }
}

#[tokio::test]
async fn a_manifest_under_another_name_is_none_of_that_name() {
    let (home, target) = target();
    let content = content(&target, "one").await;
    target.finish(&content).await.expect("a checkpoint");
    let folder = home.path().join("a b/ckpt/manifests");
    std::fs::copy(folder.join("one.json"), folder.join("two.json")).expect("copied");
    std::fs::write(folder.join("NOTES.txt"), "mine").expect("written");
    let error =
        target.get_manifest(&"two".parse().expect("a name")).await.expect_err("another's").to_string();
    assert!(error.contains("two.json") && error.contains("one"), "{error}");
    assert_eq!(target.list().await.expect("a list").len(), 2, "notes are no checkpoint");
}

#[test]
fn a_url_that_leads_nowhere_says_why_and_keeps_its_secrets() {
    for bad in ["", "ckpt", "file://host/x", "nothing://x/y", "/abs"] {
        let error = Target::create(bad).expect_err(bad).to_string();
        assert!(error.contains("is not a target"), "{error}");
    }
    for secret in ["s3://KEY:hunter2@bucket/x", "s3://bucket/x?aws_secret_access_key=hunter2"] {
        let error = Target::open(secret).expect_err("refused").to_string();
        assert!(!error.contains("hunter2") && error.contains("environment"), "{error}");
    }
    assert!(Target::open("file:///nowhere/at/all").is_err());
    let shown =
        redact("GET https://s3/bucket/x?X-Amz-Signature=hunter2 failed: AccountKey=hunter2 forbidden");
    assert!(!shown.contains("hunter2") && shown.ends_with("forbidden"), "{shown}");
}
