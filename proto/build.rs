//! Generates the gRPC types with protox (pure Rust), so that no `protoc` is needed to build Evershard.

use std::path::PathBuf;

const FILES: [&str; 6] = [
    "evershard/v1/parameter.proto",
    "evershard/v1/admin.proto",
    "evershard/v1/checkpoint.proto",
    "evershard/v1/job.proto",
    "evershard/v1/raft.proto",
    "evershard/v1/command.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=evershard");
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("evershard_descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
