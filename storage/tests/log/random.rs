//! Random operations, restarts and power cuts against the model.

use crate::model::{Model, contents, open};
use crate::script::{Run, steps};
use evershard_storage::log::Driver;
use evershard_storage::testing::{Loss, SimDisk};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Orderly or killed, the log is what the model says, restart after restart.
    #[test]
    fn the_log_is_its_model(seed: u64, rounds in 1_usize..6, length in 1_usize..120, segment_bytes in 1024_u64..6000,
                            is_inline: bool, is_closed: bool) {
        let driver = if is_inline { Driver::Inline } else { Driver::Manual };
        let disk = SimDisk::new(seed);
        let mut model = Model::new();
        for round in 0..rounds {
            let change = |options: &mut evershard_storage::log::LogOptions| options.segment_bytes = segment_bytes;
            let mut run = Run::open_with(change, &disk, driver, model).unwrap();
            run.play(&steps(seed.wrapping_add(round as u64), length));
            while run.log.pump() {}
            model = run.model().clone();
            if is_closed {
                run.log.close().unwrap();
                drop(run);
                disk.power_cycle(Loss::All);
            } else {
                drop(run);
                disk.power_cycle(Loss::Random);
            }
            let (log, recovery) = open(&disk, driver).unwrap();
            prop_assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty(), "{:?}", recovery);
            prop_assert_eq!(&contents(&log, &recovery), &model);
        }
    }
}
