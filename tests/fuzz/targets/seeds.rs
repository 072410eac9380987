//! Writes the seeds of all targets below the folder that it is given.

fn main() -> std::io::Result<()> {
    let corpus = std::env::args().nth(1).unwrap_or_else(|| "corpus".to_owned());
    let written = stepwell_fuzz::seeds::write(std::path::Path::new(&corpus))?;
    println!("{written} seeds below {corpus}");
    Ok(())
}
