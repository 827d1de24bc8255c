//! Diffs against what two maps say.

use std::collections::BTreeMap;

use evershard_proto::v1::TableDefinition;
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::testing::{content_of, directory, put_rows};

type Rows = BTreeMap<u64, [f32; 3]>;

async fn checkpoint(target: &Target, name: &str, rows: &Rows) -> Content {
    let mut runs = Vec::new();
    let all: Vec<(u64, [f32; 3])> = rows.iter().map(|(key, floats)| (*key, *floats)).collect();
    for some in all.chunks(700) {
        runs.push(put_rows(target, 1, some.to_vec()).await.expect("put"));
    }
    content_of(target, name, 1, runs).await.expect("put")
}

fn renamed(content: &Content, name: &str, number: u32) -> Content {
    let mut content = content.clone();
    let definition = TableDefinition { name: name.to_owned(), dim: 2, ..Default::default() };
    (content.tables[0].name, content.tables[0].number) = (name.to_owned(), number);
    content.tables[0].definition = definition.encode_to_vec();
    content
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_diff_is_what_two_maps_say(
        before in prop::collection::btree_map(0..40_u64, 0..3_u8, 0..40),
        after in prop::collection::btree_map(0..40_u64, 0..3_u8, 0..40),
    ) {
        // Weights of 0 and 1 are the same, their state is not.
        let rows = |kinds: &BTreeMap<u64, u8>| -> Rows {
            kinds.iter().map(|(key, kind)| (*key, [f32::from(*kind / 2), 1.0, f32::from(*kind)])).collect()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let found = runtime.block_on(async {
            let (_home, target) = directory();
            let one = checkpoint(&target, "one", &rows(&before)).await;
            let two = checkpoint(&target, "two", &rows(&after)).await;
            diff((&target, &one), (&target, &two)).await.expect("compared").remove(0)
        });
        let in_both = |test: &dyn Fn(u8, u8) -> bool| {
            before.iter().filter(|(key, one)| after.get(key).is_some_and(|two| test(**one, *two))).count() as u64
        };
        prop_assert_eq!(found.removed, before.keys().filter(|key| !after.contains_key(key)).count() as u64);
        prop_assert_eq!(found.added, after.keys().filter(|key| !before.contains_key(key)).count() as u64);
        prop_assert_eq!(found.equal, in_both(&|one, two| one == two));
        prop_assert_eq!(found.state_changed, in_both(&|one, two| one != two && one / 2 == two / 2));
        prop_assert_eq!(found.changed, in_both(&|one, two| one / 2 != two / 2));
        prop_assert_eq!(found.max_abs_difference, if found.changed > 0 { 1.0 } else { 0.0 });
        prop_assert_eq!(found.is_none(), before == after);
    }
}

#[tokio::test]
async fn rows_of_many_batches_are_compared() {
    let (_home, target) = directory();
    let mut rows: Rows = (0..5000).map(|key| (key, [1.0, 2.0, 3.0])).collect();
    let one = checkpoint(&target, "one", &rows).await;
    rows.remove(&1023);
    rows.insert(9000, [0.0; 3]);
    rows.insert(1024, [1.5, 2.0, 3.0]);
    rows.insert(2048, [f32::NAN, 2.0, 3.0]);
    rows.insert(2049, [f32::INFINITY, 6.0, 3.0]);
    let two = checkpoint(&target, "two", &rows).await;
    let found = diff((&target, &one), (&target, &two)).await.expect("compared").remove(0);
    let counts = (found.removed, found.added, found.changed, found.state_changed, found.equal, found.non_finite);
    assert_eq!(counts, (1, 1, 3, 0, 4996, 2));
    assert_eq!(found.max_abs_difference, 4.0);
    let same = diff((&target, &two), (&target, &two)).await.expect("compared").remove(0);
    assert!(same.is_none(), "NaNs of the same bits are equal: {same:?}");
}

#[tokio::test]
async fn tables_are_told_apart_by_name_and_number() {
    let (_home, target) = directory();
    let one = checkpoint(&target, "one", &[(1, [1.0; 3]), (2, [1.0; 3])].into()).await;
    let fates = |found: Vec<TableDiff>| -> Vec<(String, TableFate, u64, u64)> {
        found.into_iter().map(|table| (table.name, table.fate, table.removed, table.added)).collect()
    };
    let other = renamed(&one, "users", 4);
    let found = diff((&target, &one), (&target, &other)).await.expect("compared");
    let expected =
        [("items".to_owned(), TableFate::Removed, 2, 0), ("users".to_owned(), TableFate::Added, 0, 2)];
    assert_eq!(fates(found), expected);
    // Dropped and made again: there are no rows of its number here.
    let again = renamed(&one, "items", 5);
    let found = diff((&target, &one), (&target, &again)).await.expect("compared");
    assert_eq!(fates(found), [("items".to_owned(), TableFate::Replaced, 2, 0)]);
}

#[tokio::test]
async fn a_damaged_file_is_an_error_and_no_difference() {
    let (home, target) = directory();
    let one = checkpoint(&target, "one", &[(1, [1.0; 3])].into()).await;
    let two = checkpoint(&target, "two", &[(1, [2.0; 3])].into()).await;
    let path = two.shards[0].links[0].runs[0].file().path();
    std::fs::remove_file(home.path().join(&path)).expect("removed");
    let error = diff((&target, &one), (&target, &two)).await.expect_err("missing").to_string();
    assert!(error.contains(&path) && error.ends_with("is missing"), "{error}");
}
