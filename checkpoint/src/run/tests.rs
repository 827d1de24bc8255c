//! Runs: round trips, the bytes of version 1, and whatever else may be read as one.

use evershard_formats::golden::golden;
use evershard_formats::{bytes_or_damaged, frugal, one_bit};
use proptest::prelude::*;

use super::*;

const SHAPE: RunShape = RunShape { dim: 3, state: 2, notes: 1 };

type Row = (u64, RowHead, Vec<u32>);

fn write(rows: &[Row], shape: RunShape, bytes_max: usize) -> Vec<Run> {
    let writer = || RunWriter::with_bytes_max(9, shape, bytes_max).expect("a shape");
    let (mut runs, mut run) = (Vec::new(), writer());
    for (key, head, floats) in rows {
        if run.is_full() {
            runs.push(std::mem::replace(&mut run, writer()).finish().expect("rows"));
        }
        let floats: Vec<f32> = floats.iter().map(|bits| f32::from_bits(*bits)).collect();
        run.push(*key, *head, &floats).expect("it goes in");
    }
    runs.extend((!run.is_empty()).then(|| run.finish().expect("rows")));
    runs
}

fn read(bytes: &[u8], piece: usize) -> Result<(RunHead, Vec<Row>), RunError> {
    let (mut decoder, mut rows) = (RunDecoder::new("files/x.run"), Vec::new());
    for bytes in bytes.chunks(piece.max(1)) {
        decoder.feed(bytes);
        while let Some(block) = decoder.block()? {
            for row in block.rows() {
                let mut floats = Vec::new();
                row.read_floats(&mut floats);
                rows.push((row.key, row.head, floats.into_iter().map(f32::to_bits).collect()));
            }
        }
    }
    decoder.finish()?;
    Ok((decoder.head()?.expect("whole"), rows))
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = (any::<u64>(), any::<u32>(), 0..4_u32, prop::collection::vec(any::<u32>(), 6));
    prop::collection::btree_map(any::<u64>(), row, 1..60).prop_map(|rows| {
        rows.into_iter()
            .map(|(key, (version, steps, flags, mut floats))| {
                let head = RowHead { version, steps, flags };
                floats.truncate(SHAPE.floats(&head));
                (key, head, floats)
            })
            .collect()
    })
}

fn sample() -> Vec<Row> {
    let head = |version, steps, flags| RowHead { version, steps, flags };
    let bits = |floats: &[f32]| floats.iter().map(|float| float.to_bits()).collect::<Vec<_>>();
    vec![
        (0, head(7, 1, 0), bits(&[1.0, -0.0, f32::NAN, 0.5, 0.25, f32::from_bits(3)])),
        (5, head(9, 0, RowHead::TOMBSTONE), vec![]),
        (8, head(10, 2, RowHead::COUNTING), vec![77]),
        (u64::MAX, head(u64::MAX, u32::MAX, 0), bits(&[f32::MAX; 6])),
    ]
}

#[test]
fn version_1_stays_as_it_is() {
    let run = write(&sample(), SHAPE, RUN_BYTES_MAX).remove(0);
    let bytes = golden(env!("CARGO_MANIFEST_DIR"), "run-1.bin", &run.bytes);
    assert_eq!(read(&bytes, 1000).expect("a run"), (run.head, sample()));
}

#[test]
fn a_row_longer_than_a_block_has_one_to_itself() {
    let shape = RunShape { dim: 20_000, state: 0, notes: 0 };
    let head = RowHead { version: 1, steps: 0, flags: 0 };
    let rows: Vec<Row> = (0..5).map(|key| (key, head, vec![key as u32; 20_000])).collect();
    let runs = write(&rows, shape, 200_000);
    assert_eq!(runs.iter().map(|run| run.head.blocks).collect::<Vec<_>>(), [2, 2, 1]);
    let back: Vec<Row> = runs.iter().flat_map(|run| read(&run.bytes, 999).expect("a run").1).collect();
    assert_eq!(back, rows);
}

#[test]
fn what_no_run_holds_is_refused() {
    let head = RowHead { version: 1, steps: 0, flags: 0 };
    let mut run = RunWriter::new(1, SHAPE).expect("a shape");
    let fault = |result: Result<(), RunError>| result.expect_err("refused").fault;
    run.push(5, head, &[0.0; 6]).expect("it goes in");
    assert_eq!(fault(run.push(5, head, &[0.0; 6])), RunFault::Order { key: 5, before: 5 });
    assert_eq!(fault(run.push(6, head, &[0.0; 5])), RunFault::Floats { expected: 6, found: 5 });
    assert_eq!(fault(run.push(6, RowHead { flags: 4, ..head }, &[0.0; 6])), RunFault::Flags { found: 4 });
    assert_eq!(read(&run.finish().expect("a row").bytes, 64).expect("a run").1.len(), 1, "nothing was added");
    assert_eq!(
        RunWriter::new(1, SHAPE).expect("a shape").finish().expect_err("empty").fault,
        RunFault::Empty
    );
    assert!(RunWriter::new(1, RunShape { dim: 0, ..SHAPE }).is_err());
    assert!(RunWriter::new(1, RunShape { dim: u32::MAX, ..SHAPE }).is_err());
}

#[test]
fn every_cut_and_every_byte_more_is_noticed() {
    let run = write(&sample(), SHAPE, RUN_BYTES_MAX).remove(0);
    for length in 0..run.bytes.len() {
        let fault = read(&run.bytes[..length], 10).expect_err("cut").fault;
        assert_eq!(fault, RunFault::Short, "{length}");
    }
    let longer = [&run.bytes[..], &[0]].concat();
    assert_eq!(read(&longer, 10).expect_err("longer").fault, RunFault::Long);
}

proptest! {
    #[test]
    fn rows_come_back_to_the_bit(rows in rows(), piece in 1..500_usize, bytes_max in 100..3000_usize) {
        let runs = write(&rows, SHAPE, bytes_max);
        let mut back = Vec::new();
        for run in &runs {
            let (head, rows) = read(&run.bytes, piece).expect("a run");
            prop_assert_eq!(head, run.head);
            back.extend(rows);
        }
        prop_assert_eq!(back, rows);
    }

    #[test]
    fn fuzz_run(bytes in bytes_or_damaged(rows().prop_map(|rows| write(&rows, SHAPE, RUN_BYTES_MAX)[0].bytes.to_vec()))) {
        if let Ok((_, rows)) = frugal(4 * bytes.len() + (1 << 16), || read(&bytes, 777)) {
            // What is read as a run is what is written of its rows.
            let head = read(&bytes, 777).expect("read before").0;
            let again = write(&rows, head.shape, RUN_BYTES_MAX).remove(0);
            prop_assert_eq!(again.head.rows, head.rows);
        }
    }

    #[test]
    fn fuzz_run_one_bit((bytes, damaged) in one_bit(rows().prop_map(|rows| write(&rows, SHAPE, RUN_BYTES_MAX)[0].bytes.to_vec()))) {
        prop_assert!(read(&damaged, 100).is_err(), "{} bytes", bytes.len());
    }
}
