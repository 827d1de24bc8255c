//! `evershardctl checkpoint create`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use evershard_checkpoint::name::CheckpointName;
use evershard_proto::v1::create_checkpoint_event::Event;
use evershard_proto::v1::{CheckpointDone, CreateCheckpointRequest};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::{Global, Output};
use crate::commands::status::bytes;
use crate::connection::Connection;
use crate::error::{CtlError, words};
use crate::output;

/// Create a checkpoint: exact at one point between two steps of every job. Training goes on meanwhile.
#[derive(Debug, Args)]
#[command(
    after_help = "Workers are held between two steps for the moment that every shard needs to note the point (hold_ms); rows are
written in the background, from followers where possible. What is at the target already is not written again.

Examples:
  evershardctl checkpoint create --to file:///ckpt --name day-1
  evershardctl checkpoint create --to s3://bucket/model --name day-1 --set epoch=3
  evershardctl checkpoint create --to file:///ckpt --name day-2 --output json | jq .hold_ms"
)]
pub(crate) struct CreateArgs {
    /// The directory or bucket, as every node sees it: file:///path, s3://bucket/path, gs://, az://.
    #[arg(long, value_name = "URL")]
    to: String,
    /// Its name: a-z, 0-9, '.', '_' and '-'.
    #[arg(long)]
    name: CheckpointName,
    /// Write all rows, although there is a checkpoint to build upon.
    #[arg(long)]
    base: bool,
    /// Whatever is to be found again with it (may be given several times).
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Seconds to wait for workers to end their step.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    hold_within: u32,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    if key.is_empty() { Err("the key is empty".into()) } else { Ok((key.to_owned(), value.to_owned())) }
}

#[derive(Debug, Serialize)]
struct CreatedView {
    name: String,
    bytes_total: u64,
    bytes_added: u64,
    hold_ms: f64,
    wait_ms: f64,
    #[serde(skip_serializing_if = "String::is_empty")]
    parent: String,
    shards: Vec<CutView>,
}

#[derive(Debug, Serialize)]
struct CutView {
    id: u32,
    cut_index: u64,
    node: u64,
    kind: &'static str,
}

impl From<CheckpointDone> for CreatedView {
    fn from(done: CheckpointDone) -> Self {
        let cut = |cut: evershard_proto::v1::ShardCut| CutView {
            id: cut.shard,
            cut_index: cut.index,
            node: cut.node,
            kind: if cut.above == 0 { "base" } else { "delta" },
        };
        let mut shards: Vec<CutView> = done.shards.into_iter().map(cut).collect();
        shards.sort_by_key(|shard| shard.id);
        CreatedView {
            name: done.name,
            bytes_total: done.bytes_total,
            bytes_added: done.bytes_added,
            hold_ms: done.hold_ms,
            wait_ms: done.wait_ms,
            parent: done.parent,
            shards,
        }
    }
}

pub(crate) async fn run(global: &Global, args: &CreateArgs) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let request = CreateCheckpointRequest {
        url: args.to.clone(),
        name: args.name.to_string(),
        metadata: args.metadata.iter().cloned().collect::<BTreeMap<_, _>>().into_iter().collect(),
        base: args.base,
        hold_within_ms: args.hold_within.saturating_mul(1000),
        forwarded: false,
    };
    let (mut events, address) = connection
        .call("create a checkpoint", |node| {
            let request = request.clone();
            async move { node.checkpoints().create_checkpoint(request).await }
        })
        .await?;
    // Shown on a terminal only.
    let spinner = ProgressBar::new_spinner().with_message("waiting for workers to end their step");
    spinner.enable_steady_tick(Duration::from_millis(100));
    let refused = |message: String| CtlError::Refused {
        address: address.clone(),
        action: "create a checkpoint",
        message,
    };
    let done = loop {
        match events.message().await.map_err(|status| refused(words(&status)))?.and_then(|event| event.event)
        {
            Some(Event::Held(_)) => {}
            Some(Event::Cut(cut)) => {
                spinner.set_message(format!("workers go on after {:.1} ms; writing rows", cut.hold_ms));
            }
            Some(Event::Progress(progress)) => spinner.set_message(format!(
                "{} rows, {}; {} of {} shards",
                progress.rows,
                bytes(progress.bytes),
                progress.shards_done,
                progress.shards
            )),
            Some(Event::Done(done)) => break done,
            None => {
                return Err(refused(
                    "the node ended the call without a result: look with `checkpoint list`".into(),
                ));
            }
        }
    };
    spinner.finish_and_clear();
    let view = CreatedView::from(done);
    match global.output {
        Output::Json => output::json(&view)?,
        Output::Table => {
            let upon =
                if view.parent.is_empty() { String::new() } else { format!(", builds upon {}", view.parent) };
            output::text_line(&format!(
                "checkpoint {}: {}, {} of them added{upon}; workers were waited for {:.0} ms and held for {:.1} ms",
                view.name,
                bytes(view.bytes_total),
                bytes(view.bytes_added),
                view.wait_ms,
                view.hold_ms
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::ShardCut;

    #[test]
    fn the_json_has_the_stable_shape() {
        let shards = vec![ShardCut { shard: 3, group: 4, index: 9, node: 2, above: 0 }];
        let done = CheckpointDone {
            name: "a".into(),
            bytes_total: 5,
            bytes_added: 4,
            hold_ms: 1.5,
            wait_ms: 2.0,
            shards,
            ..Default::default()
        };
        let json = serde_json::to_string(&CreatedView::from(done)).unwrap();
        let expected = r#"{"name":"a","bytes_total":5,"bytes_added":4,"hold_ms":1.5,"wait_ms":2.0,"shards":[{"id":3,"cut_index":9,"node":2,"kind":"base"}]}"#;
        assert_eq!(json, expected);
    }

    #[test]
    fn what_is_set_has_a_name() {
        assert_eq!(pair("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(pair("a").is_err() && pair("=b").is_err());
    }
}
