//! Contents that nobody wrote: JSON with a right checksum, and anything at its places.

use evershard_formats::frugal;
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::hash::FileHash;

/// Values that a careless reader might take.
fn odd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just(0_u64), Just(1), Just(u64::MAX), Just(u64::MAX / 2)].prop_map(Value::from),
        "[0-9a-f]{16}".prop_map(Value::from),
        "[0-9a-f]{32}".prop_map(Value::from),
        "[ -~]{0,12}".prop_map(Value::from),
        Just(Value::Array(Vec::new())),
        Just(Value::Object(serde_json::Map::new())),
    ]
}

/// Every place of a value: the way there.
fn places(value: &Value, here: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                places(value, &format!("{here}/{name}"), found);
            }
        }
        Value::Array(values) => {
            for (at, value) in values.iter().enumerate() {
                places(value, &format!("{here}/{at}"), found);
            }
        }
        _ => {}
    }
    found.push(here.to_owned());
}

proptest! {
    #[test]
    fn fuzz_manifest_content(changes in prop::collection::vec((any::<prop::sample::Index>(), odd(), any::<bool>()), 1..4)) {
        let mut content = serde_json::to_value(sample()).expect("JSON");
        for (at, value, removes) in changes {
            let mut all = Vec::new();
            places(&content, "", &mut all);
            let place = at.get(&all).clone();
            if let Some((parent, name)) = place.rsplit_once('/').filter(|_| removes)
                && let Some(Value::Object(fields)) = content.pointer_mut(parent)
            {
                fields.remove(name);
            } else if let Some(found) = content.pointer_mut(&place) {
                *found = value;
            }
        }
        let text = content.to_string();
        let checksum = FileHash::of(text.as_bytes());
        let bytes = format!(r#"{{"format":"evershard-checkpoint","version":1,"checksum":"{checksum}","content":{text}}}"#);
        match frugal(bytes.len(), || decode(bytes.as_bytes())) {
            // What is taken is whole, and is written as it was understood.
            Ok(content) => {
                content.check().expect("was checked");
                prop_assert_eq!(decode(&encode(&content).expect("was checked")).expect("ours"), content);
            }
            Err(error) => prop_assert!(!matches!(error, ManifestError::Checksum { .. } | ManifestError::Version { .. }), "{}", error),
        }
    }
}
