//! `evershardctl table set-optimizer TABLE --lr 0.01 ...`: reads the table's optimizer, changes what is given, and sets the
//! whole. Refused when another changed it in between.

use std::process::ExitCode;

use clap::Args;
use evershard_proto::v1::optimizer::Kind;
use evershard_proto::v1::{CosineDecay, Optimizer, SetOptimizerRequest, StepDecay, schedule};
use serde_json::json;

use super::show;
use crate::cli::{Global, Output};
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

/// Change hyper-parameters of a table's optimizer. They are in force on every shard when this returns.
#[derive(Debug, Args)]
#[command(
    after_help = "What is not given stays as it is; so do weights and optimizer state. Another kind of optimizer is refused, and so is
a table whose optimizer somebody else changed in between: look again, and decide again.

Examples:
  evershardctl table set-optimizer items --lr 0.01
  evershardctl table set-optimizer items --lr 0.1 --warmup-steps 1000 --cosine 50000,0.01"
)]
pub(crate) struct SetOptimizerArgs {
    /// The table's name.
    table: String,
    #[command(flatten)]
    changes: Changes,
}

/// What is to be changed: one thing at least.
#[derive(Debug, Default, Args)]
#[group(required = true, multiple = true)]
struct Changes {
    /// Learning rate.
    #[arg(long)]
    lr: Option<f32>,
    /// L2 penalty (of AdamW: decoupled).
    #[arg(long)]
    weight_decay: Option<f32>,
    /// Bound of each gradient value; 0 for none.
    #[arg(long)]
    clip_value: Option<f32>,
    /// Bound of each row's gradient norm; 0 for none.
    #[arg(long)]
    clip_norm: Option<f32>,
    /// Of Adagrad, RMSprop, Adam and AdamW.
    #[arg(long)]
    eps: Option<f32>,
    /// Of Adagrad: for rows that are not trained yet.
    #[arg(long)]
    initial_accumulator: Option<f32>,
    /// Of Adam and AdamW.
    #[arg(long)]
    beta1: Option<f32>,
    /// Of Adam and AdamW.
    #[arg(long)]
    beta2: Option<f32>,
    /// Of SGD with momentum, and of RMSprop with momentum.
    #[arg(long)]
    momentum: Option<f32>,
    /// Of SGD with momentum.
    #[arg(long)]
    dampening: Option<f32>,
    /// Of SGD with momentum.
    #[arg(long, value_name = "true|false")]
    nesterov: Option<bool>,
    /// Of RMSprop.
    #[arg(long)]
    alpha: Option<f32>,
    /// Of FTRL.
    #[arg(long)]
    beta: Option<f32>,
    /// Of FTRL.
    #[arg(long)]
    l1: Option<f32>,
    /// Of FTRL.
    #[arg(long)]
    l2: Option<f32>,
    /// Steps of linear warm-up; 0 for none.
    #[arg(long, value_name = "STEPS")]
    warmup_steps: Option<u64>,
    /// After the warm-up, multiply the rate by FACTOR at every EVERY steps.
    #[arg(long, value_name = "EVERY,FACTOR", value_parser = parse_decay, conflicts_with_all = ["cosine", "constant"])]
    step_decay: Option<(u64, f32)>,
    /// After the warm-up, half a cosine down to FLOOR times the rate within STEPS.
    #[arg(long, value_name = "STEPS,FLOOR", value_parser = parse_decay, conflicts_with = "constant")]
    cosine: Option<(u64, f32)>,
    /// After the warm-up, no decay.
    #[arg(long)]
    constant: bool,
}

fn parse_decay(text: &str) -> Result<(u64, f32), String> {
    let parsed = text.split_once(',').and_then(|(steps, share)| {
        Some((steps.trim().parse::<u64>().ok()?, share.trim().parse::<f32>().ok()?))
    });
    parsed.ok_or_else(|| "a number of steps, a comma, and a number between 0 and 1".to_owned())
}

pub(crate) async fn run(global: &Global, args: &SetOptimizerArgs) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let (description, definition) = super::find(&connection.routing, &args.table)?;
    let known = definition.optimizer.unwrap_or_default();
    let optimizer = args.changes.applied_to(known).map_err(|flag| CtlError::NotOfThisOptimizer {
        table: args.table.clone(),
        optimizer: show::plain(&show::optimizer_of(definition)),
        flag,
    })?;
    let request = SetOptimizerRequest {
        name: args.table.clone(),
        number: description.number,
        optimizer: Some(optimizer),
        expected_version: Some(description.definition_version),
    };
    let (now, _) = connection
        .call("set the optimizer", |node| {
            let request = request.clone();
            async move { node.admin().set_optimizer(request).await }
        })
        .await?;
    let shown = now.definition.as_ref().map(show::optimizer_of).unwrap_or_default();
    match global.output {
        Output::Json => output::json(&json!({
            "name": args.table,
            "number": now.number,
            "definition_version": now.definition_version,
            "optimizer": shown,
        }))?,
        Output::Table => eprintln!("table {}: {}, on every shard", args.table, show::plain(&shown)),
    }
    Ok(ExitCode::SUCCESS)
}

impl Changes {
    /// The optimizer with what is given here.
    ///
    /// # Errors
    /// The first flag of something that this kind of optimizer does not have.
    fn applied_to(&self, mut optimizer: Optimizer) -> Result<Optimizer, &'static str> {
        let numbers = [
            ("--lr", self.lr),
            ("--weight-decay", self.weight_decay),
            ("--clip-value", self.clip_value),
            ("--clip-norm", self.clip_norm),
            ("--eps", self.eps),
            ("--initial-accumulator", self.initial_accumulator),
            ("--beta1", self.beta1),
            ("--beta2", self.beta2),
            ("--momentum", self.momentum),
            ("--dampening", self.dampening),
            ("--alpha", self.alpha),
            ("--beta", self.beta),
            ("--l1", self.l1),
            ("--l2", self.l2),
        ];
        for (flag, value) in numbers {
            if let Some(value) = value {
                *number(&mut optimizer, flag).ok_or(flag)? = value;
            }
        }
        if let Some(nesterov) = self.nesterov {
            let Some(Kind::Momentum(momentum)) = &mut optimizer.kind else { return Err("--nesterov") };
            momentum.nesterov = nesterov;
        }
        let decay = match (self.step_decay, self.cosine) {
            (Some((every, factor)), _) => Some(schedule::Decay::Step(StepDecay { every, factor })),
            (None, Some((steps, floor))) => Some(schedule::Decay::Cosine(CosineDecay { steps, floor })),
            (None, None) => None,
        };
        if self.warmup_steps.is_some() || decay.is_some() || self.constant {
            let mut schedule = optimizer.schedule.unwrap_or_default();
            schedule.warmup_steps = self.warmup_steps.unwrap_or(schedule.warmup_steps);
            if decay.is_some() || self.constant {
                schedule.decay = decay;
            }
            optimizer.schedule = Some(schedule);
        }
        Ok(optimizer)
    }
}

/// What a flag stands for in this kind of optimizer, if anything.
fn number<'a>(optimizer: &'a mut Optimizer, flag: &str) -> Option<&'a mut f32> {
    match (flag, optimizer.kind.as_mut()?) {
        ("--weight-decay", _) => Some(&mut optimizer.weight_decay),
        ("--clip-value", _) => Some(&mut optimizer.clip_value),
        ("--clip-norm", _) => Some(&mut optimizer.clip_norm),
        ("--lr", Kind::Sgd(rule)) => Some(&mut rule.lr),
        ("--lr", Kind::Adagrad(rule)) => Some(&mut rule.lr),
        ("--eps", Kind::Adagrad(rule)) => Some(&mut rule.eps),
        ("--initial-accumulator", Kind::Adagrad(rule)) => Some(&mut rule.initial_accumulator),
        ("--lr", Kind::Adam(rule)) => Some(&mut rule.lr),
        ("--beta1", Kind::Adam(rule)) => Some(&mut rule.beta1),
        ("--beta2", Kind::Adam(rule)) => Some(&mut rule.beta2),
        ("--eps", Kind::Adam(rule)) => Some(&mut rule.eps),
        ("--lr", Kind::Momentum(rule)) => Some(&mut rule.lr),
        ("--momentum", Kind::Momentum(rule)) => Some(&mut rule.momentum),
        ("--dampening", Kind::Momentum(rule)) => Some(&mut rule.dampening),
        ("--lr", Kind::RowwiseAdagrad(rule)) => Some(&mut rule.lr),
        ("--eps", Kind::RowwiseAdagrad(rule)) => Some(&mut rule.eps),
        ("--initial-accumulator", Kind::RowwiseAdagrad(rule)) => Some(&mut rule.initial_accumulator),
        ("--lr", Kind::RmsProp(rule)) => Some(&mut rule.lr),
        ("--alpha", Kind::RmsProp(rule)) => Some(&mut rule.alpha),
        ("--eps", Kind::RmsProp(rule)) => Some(&mut rule.eps),
        ("--momentum", Kind::RmsProp(rule)) => Some(&mut rule.momentum),
        ("--lr", Kind::AdamW(rule)) => Some(&mut rule.lr),
        ("--beta1", Kind::AdamW(rule)) => Some(&mut rule.beta1),
        ("--beta2", Kind::AdamW(rule)) => Some(&mut rule.beta2),
        ("--eps", Kind::AdamW(rule)) => Some(&mut rule.eps),
        ("--lr", Kind::Ftrl(rule)) => Some(&mut rule.lr),
        ("--beta", Kind::Ftrl(rule)) => Some(&mut rule.beta),
        ("--l1", Kind::Ftrl(rule)) => Some(&mut rule.l1),
        ("--l2", Kind::Ftrl(rule)) => Some(&mut rule.l2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::{Adagrad, Schedule};

    fn adagrad() -> Optimizer {
        let kind = Kind::Adagrad(Adagrad { lr: 0.1, eps: 1e-8, initial_accumulator: 0.5 });
        let schedule = Some(Schedule {
            warmup_steps: 7,
            decay: Some(schedule::Decay::Step(StepDecay { every: 3, factor: 0.5 })),
        });
        Optimizer { kind: Some(kind), weight_decay: 0.25, schedule, ..Default::default() }
    }

    #[test]
    fn what_is_not_given_stays_as_it_is() {
        let changes = Changes { lr: Some(0.01), clip_norm: Some(2.0), ..Changes::default() };
        let kind = Kind::Adagrad(Adagrad { lr: 0.01, eps: 1e-8, initial_accumulator: 0.5 });
        let expected = Optimizer { kind: Some(kind), clip_norm: 2.0, ..adagrad() };
        assert_eq!(changes.applied_to(adagrad()), Ok(expected));
    }

    #[test]
    fn a_schedule_changes_in_its_parts() {
        let schedule =
            |changes: Changes| changes.applied_to(adagrad()).expect("its own").schedule.expect("one");
        let warmed = schedule(Changes { warmup_steps: Some(1), ..Changes::default() });
        assert_eq!(warmed, Schedule { warmup_steps: 1, ..adagrad().schedule.expect("one") });
        let constant = schedule(Changes { constant: true, ..Changes::default() });
        assert_eq!(constant, Schedule { warmup_steps: 7, decay: None });
        let cosine = schedule(Changes { cosine: Some((9, 0.5)), ..Changes::default() });
        let decay = Some(schedule::Decay::Cosine(CosineDecay { steps: 9, floor: 0.5 }));
        assert_eq!(cosine, Schedule { warmup_steps: 7, decay });
    }

    #[test]
    fn what_the_optimizer_does_not_have_is_named() {
        let refused = |changes: Changes, optimizer| changes.applied_to(optimizer).expect_err("not its own");
        assert_eq!(refused(Changes { beta1: Some(0.5), ..Changes::default() }, adagrad()), "--beta1");
        assert_eq!(refused(Changes { nesterov: Some(true), ..Changes::default() }, adagrad()), "--nesterov");
        // A table without an optimizer.
        assert_eq!(refused(Changes { lr: Some(0.5), ..Changes::default() }, Optimizer::default()), "--lr");
    }

    #[test]
    fn a_decay_is_steps_and_a_share() {
        assert_eq!(parse_decay("1000, 0.5"), Ok((1000, 0.5)));
        for wrong in ["", "5", "x,1", "5,", "-1,0.5"] {
            assert!(parse_decay(wrong).is_err(), "{wrong}");
        }
    }
}
