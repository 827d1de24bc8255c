//! Golden files: the bytes of one version of a format. Stores and logs in the field hold such bytes, so a file never
//! changes; a new layout gets a new version number and a new file.

use std::path::Path;

/// Set to write the files of a new version instead of comparing with them.
const BLESS: &str = "EVERSHARD_BLESS";

/// Compares what is encoded today with the golden file `name` of a crate (`env!("CARGO_MANIFEST_DIR")`), and gives the
/// file's bytes, for decoding.
///
/// # Panics
/// When they differ, or the file cannot be read.
#[must_use]
pub fn golden(crate_directory: &str, name: &str, encoded: &[u8]) -> Vec<u8> {
    let path = Path::new(crate_directory).join("golden").join(name);
    if std::env::var_os(BLESS).is_some() && !path.exists() {
        std::fs::create_dir_all(path.parent().expect("a file in a folder"))
            .expect("the folder of golden files");
        std::fs::write(&path, encoded).expect("a golden file");
    }
    let golden = std::fs::read(&path).unwrap_or_else(|error| {
        panic!("{}: {error} ({BLESS}=1 writes the file of a new version)", path.display())
    });
    assert!(
        golden == encoded,
        "the layout of {name} has changed; bytes in the field are read with it\n golden {golden:02x?}\nencoded {encoded:02x?}"
    );
    golden
}
