// Assembles a vector of bytes from the words it touches (microarchitecture.md, "MAC array").
// Byte e of a vector that starts `offset` bytes into its first word is byte (e + offset) % W of word
// (e + offset) / W: words are rotated, and each byte taken from the word it is in.
module tw_mac_align
  import tw_pkg::*;
#(
    parameter int unsigned OFFSET_BITS = $clog2(W)
) (
    input logic clk,
    input logic rst,
    input logic valid,  // a word arrives
    input logic [WB-1:0] data,
    input logic [OFFSET_BITS-1:0] offset,
    input logic [6:0] word,  // its number within the vector
    input logic last,  // of the vector
    input logic [7:0] bytes,  // of the vector, minus one
    output logic full_q,  // the vector is complete
    output logic [7:0] vector_q[N]  // bytes behind the vector's end are zero
);
  always_ff @(posedge clk) begin
    full_q <= valid && last && !rst;
    if (valid) begin
      logic [WB-1:0] rotated;
      logic [7:0] next[N];
      rotated = WB'({data, data} >> {offset, 3'b000});
      for (int unsigned e = 0; e < N; e++) begin
        if (word == 7'((9'(e) + 9'(offset)) >> OFFSET_BITS)) begin
          next[e] = 8'(e) <= bytes ? rotated[8*(e%W)+:8] : 8'd0;
        end else begin
          next[e] = word == 7'd0 ? 8'd0 : vector_q[e];
        end
      end
      vector_q <= next;
    end
  end
endmodule
