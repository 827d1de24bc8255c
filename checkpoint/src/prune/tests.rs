//! Prunes: what goes, a death at every step, and checkpoints that are made meanwhile.

use std::collections::BTreeSet;

use super::*;
use crate::target::Dying;
use crate::testing::{content_of, directory, put_rows, rows_of};

const HOUR: Duration = Duration::from_secs(3600);

fn options(last: usize) -> PruneOptions {
    PruneOptions { keep: Keep::new(last, 0, 0).expect("a rule"), grace: Duration::ZERO }
}

/// Checkpoints `c1` to `c<n>`: of a run that all have, and one of their own.
async fn checkpoints(target: &Target, count: u64) {
    for number in 1..=count {
        let common = put_rows(target, 1, (0..10).map(|key| (key, [1.0; 3]))).await.expect("put");
        let own = put_rows(target, 2, [(100 + number, [2.0; 3])]).await.expect("put");
        let content =
            content_of(target, &format!("c{number}"), number, vec![common, own]).await.expect("put");
        target.finish(&content).await.expect("a checkpoint");
    }
}

fn names(found: &[CheckpointName]) -> Vec<&str> {
    found.iter().map(CheckpointName::as_str).collect()
}

fn files_of(home: &tempfile::TempDir, folder: &str) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(home.path().join(folder)) else { return BTreeSet::new() };
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

#[tokio::test]
async fn what_no_rule_keeps_goes_with_the_files_that_nobody_else_needs() {
    let (home, target) = directory();
    checkpoints(&target, 3).await;
    std::fs::write(home.path().join("files/notes.txt"), "mine").expect("written");
    let before = files_of(&home, "files");
    let planned = plan(&target, &options(1)).await.expect("a plan");
    assert_eq!((names(&planned.kept), names(&planned.removed)), (vec!["c3"], vec!["c2", "c1"]));
    assert_eq!(planned.files, 2, "a run of each; the common one and the state stay");
    assert_eq!(
        (files_of(&home, "files"), files_of(&home, "manifests").len()),
        (before, 3),
        "nothing changed"
    );
    assert_eq!(prune(&target, &options(1)).await.expect("pruned"), planned);
    assert_eq!(rows_of(&target, "c3").await.expect("whole"), 11);
    assert_eq!(files_of(&home, "files").len(), 4, "two runs, a state, and what is not ours");
    for folder in ["writing", "pruning"] {
        assert_eq!(files_of(&home, folder), BTreeSet::new());
    }
    let again = prune(&target, &options(1)).await.expect("pruned");
    assert_eq!((again.removed.len(), again.files), (0, 0));
}

#[tokio::test]
async fn young_files_stay_for_as_long_as_the_grace() {
    let (_home, target) = directory();
    checkpoints(&target, 2).await;
    let report = prune(&target, &PruneOptions { grace: HOUR, ..options(1) }).await.expect("pruned");
    assert_eq!((report.removed.len(), report.files, report.files_left), (1, 0, None));
    assert_eq!(prune(&target, &options(1)).await.expect("pruned").files, 1);
}

#[tokio::test]
async fn a_manifest_that_cannot_be_read_keeps_all_files() {
    let (home, target) = directory();
    checkpoints(&target, 2).await;
    std::fs::write(home.path().join("manifests/c0.json"), "{").expect("written");
    let files = files_of(&home, "files");
    let report = prune(&target, &options(1)).await.expect("pruned");
    assert_eq!((names(&report.removed), report.files_left), (vec!["c1"], Some(FilesLeft::Broken)));
    assert!(report.broken[0].1.contains("c0.json"), "{:?}", report.broken);
    assert_eq!(files_of(&home, "files"), files);
    std::fs::remove_file(home.path().join("manifests/c0.json")).expect("removed");
    assert_eq!(prune(&target, &options(1)).await.expect("pruned").files, 1);
}

#[tokio::test]
async fn a_prune_may_die_at_any_step_and_leaves_whole_checkpoints() {
    for changes in 0.. {
        let (home, target) = directory();
        checkpoints(&target, 3).await;
        let died = prune(&Dying::after(&target, changes), &options(1)).await;
        for listed in target.list().await.expect("a list") {
            assert_eq!(rows_of(&target, listed.name.as_str()).await.expect("whole"), 11, "{changes} changes");
        }
        assert_eq!(rows_of(&target, "c3").await.expect("stays"), 11);
        // A later one goes on: the mark of the dead does not stop it.
        prune(&target, &options(1)).await.expect("pruned");
        assert_eq!((files_of(&home, "manifests").len(), files_of(&home, "files").len()), (1, 3));
        if let Ok(report) = died {
            assert_eq!(report.files, 2);
            assert_eq!(changes, 6, "2 manifests, a mark, 2 files, the mark again");
            return;
        }
    }
}

#[tokio::test]
async fn a_checkpoint_may_die_at_any_step_and_is_there_whole_or_not_at_all() {
    for changes in 0.. {
        let (home, target) = directory();
        checkpoints(&target, 1).await;
        let dying = Dying::after(&target, changes);
        let made = async {
            let mut writing = dying.begin(&"new".parse().expect("a name")).await?;
            let run = put_rows(&dying, 1, [(7, [7.0; 3])]).await?;
            let content = content_of(&dying, "new", 9, vec![run]).await?;
            writing.renew().await?;
            writing.finish(&content).await
        };
        let made = made.await;
        if target.has(&"new".parse().expect("a name")).await.expect("asked") {
            assert_eq!(rows_of(&target, "new").await.expect("whole"), 1);
        } else {
            assert!(made.is_err());
        }
        assert_eq!(rows_of(&target, "c1").await.expect("the one before stays"), 11);
        if made.is_ok() && files_of(&home, "writing").is_empty() {
            assert!(changes > 4, "{changes}");
            return;
        }
        // Whoever died holds files until its mark is stale.
        if !files_of(&home, "writing").is_empty() {
            let left = prune(&target, &options(9)).await.expect("pruned").files_left;
            assert!(matches!(left, Some(FilesLeft::Writing { .. })), "{left:?}");
        }
    }
}

#[tokio::test]
async fn while_somebody_writes_no_file_goes_and_the_dead_do_not_count() {
    let (_home, target) = directory();
    checkpoints(&target, 1).await;
    let name: CheckpointName = "new".parse().expect("a name");
    let mut writing = target.begin(&name).await.expect("begun");
    let run = put_rows(&target, 1, [(7, [7.0; 3])]).await.expect("put");
    let left = prune(&target, &options(1)).await.expect("pruned").files_left;
    assert!(matches!(left, Some(FilesLeft::Writing { mark }) if mark.starts_with("writing/new-")));
    assert!(matches!(
        plan(&target, &options(1)).await.expect("a plan").files_left,
        Some(FilesLeft::Writing { .. })
    ));
    // It is paused for so long that it is taken for dead: its file goes, and it hears of that at its end.
    writing.make_old(2 * crate::target::WRITING_STALE_AFTER);
    let report = prune(&target, &options(1)).await.expect("pruned");
    assert_eq!((report.files, report.files_left), (1, None));
    let mut content = content_of(&target, "new", 9, Vec::new()).await.expect("put");
    content.shards[0].links[0].runs.push(run);
    content.bytes_total = content.sum_of_bytes();
    let error = writing.finish(&content).await.expect_err("a file is gone").to_string();
    assert!(error.ends_with("is missing"), "{error}");
    assert!(!target.has(&name).await.expect("asked"));
}

#[tokio::test]
async fn who_begins_waits_for_a_prune_and_not_for_a_dead_one() {
    let (_home, target) = directory();
    let name: CheckpointName = "new".parse().expect("a name");
    let mut mark = target.put_mark(MarkKind::Pruning, "").await.expect("a mark");
    let error = target.begin_within(&name, Duration::from_millis(300)).await.expect_err("it prunes");
    assert!(matches!(error, TargetError::Pruning { .. }), "{error}");
    let waiting = tokio::spawn({
        let (target, name) = (target.clone(), name.clone());
        async move { target.begin_within(&name, HOUR).await.map(drop) }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    target.remove_mark(mark).await.expect("removed");
    waiting.await.expect("no panic").expect("begun");
    mark = target.put_mark(MarkKind::Pruning, "").await.expect("a mark");
    target.make_old(&mut mark, 2 * PRUNING_STALE_AFTER);
    target.begin_within(&name, Duration::from_millis(300)).await.expect("begun");
}

#[tokio::test]
async fn a_mark_that_was_taken_for_stale_comes_back_under_another_name() {
    let (home, target) = directory();
    let mut mark = target.put_mark(MarkKind::Writing, "x").await.expect("a mark");
    let first = files_of(&home, "writing");
    target.renew_mark(&mut mark).await.expect("renewed");
    assert_eq!(files_of(&home, "writing"), first, "it was young");
    target.make_old(&mut mark, 2 * crate::target::WRITING_STALE_AFTER);
    target.renew_mark(&mut mark).await.expect("renewed");
    let second = files_of(&home, "writing");
    assert!(second.len() == 1 && second != first, "{first:?} {second:?}");
}

#[tokio::test]
async fn of_two_who_make_one_name_one_does() {
    let (home, target) = directory();
    let content = |version: u64| {
        let target = target.clone();
        async move {
            let run = put_rows(&target, version, [(7, [version as f32; 3])]).await.expect("put");
            content_of(&target, "new", version, vec![run]).await.expect("put")
        }
    };
    let (one, two) = (content(1).await, content(2).await);
    let name: CheckpointName = "new".parse().expect("a name");
    let (first, second) =
        (target.begin(&name).await.expect("begun"), target.begin(&name).await.expect("begun"));
    let (first, second) = tokio::join!(first.finish(&one), second.finish(&two));
    assert_eq!(usize::from(first.is_ok()) + usize::from(second.is_ok()), 1);
    let found = target.get_manifest(&name).await.expect("there");
    assert_eq!(found, if first.is_ok() { one } else { two });
    assert!(matches!(first.and(second), Err(TargetError::Exists { .. })));
    assert!(matches!(target.begin(&name).await, Err(TargetError::Exists { .. })));
    assert_eq!(files_of(&home, "writing"), BTreeSet::new());
}

#[tokio::test]
async fn prunes_and_checkpoints_at_once_leave_whole_checkpoints() {
    let (_home, target) = directory();
    let makers = (0..3_u64).map(|maker| {
        let target = target.clone();
        tokio::spawn(async move {
            let mut made = Vec::new();
            for round in 0..6_u64 {
                let name = format!("m{maker}-{round}");
                let writing = target.begin(&name.parse().expect("a name")).await.expect("begun");
                // Rows that others have had, and may have lost: "there already" must hold till the end.
                let run = put_rows(&target, 1, [(round % 2, [1.0; 3])]).await.expect("put");
                let content = content_of(&target, &name, 10 * round + maker, vec![run]).await.expect("put");
                writing.finish(&content).await.expect("a checkpoint");
                made.push(name);
            }
        })
    });
    let makers: Vec<_> = makers.collect();
    let pruner = tokio::spawn({
        let target = target.clone();
        async move {
            for _ in 0..40 {
                prune(&target, &options(2)).await.expect("pruned");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    });
    for maker in makers {
        maker.await.expect("no panic");
    }
    pruner.await.expect("no panic");
    prune(&target, &options(2)).await.expect("pruned");
    let listed = target.list().await.expect("a list");
    assert_eq!(listed.len(), 2);
    for listed in listed {
        assert_eq!(rows_of(&target, listed.name.as_str()).await.expect("whole"), 1);
    }
}
